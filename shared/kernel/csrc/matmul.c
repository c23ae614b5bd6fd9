/* Quantised activations, and the walk over the chunks of a matrix. The inner loops are the path's. */
#include "internal.h"
#include "numbers.h"

#include <string.h>

/* A group of 32; the second term goes to `low`, unless it is NULL. Returns 0 if the group holds a
 * value that is not finite. */
static int quantize_group(const float *x, int8_t *q, int8_t *low, float *d, float *ds)
{
    uint32_t max_bits = 0; /* of |x|: the bits of non-negative floats are ordered as they are */
    int32_t rounded[CP_GROUP];
    int32_t i, sum = 0, steps = low ? 127 * CP_FIRST_TERM : 127;
    float amax, id;
    for (i = 0; i < CP_GROUP; i++) {
        uint32_t bits = cp_bits(x[i]) & 0x7fffffffu;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    if (max_bits >= 0x7f800000u)
        return 0;
    amax = cp_float(max_bits);
    if (max_bits < (127u - 100u) << 23) { /* 2^-100 */
        memset(q, 0, CP_GROUP);
        if (low)
            memset(low, 0, CP_GROUP);
        *d = *ds = 0.0f;
        return 1;
    }
    id = (float)steps / amax;
    for (i = 0; i < CP_GROUP; i++) {
        int32_t v = cp_rint_int(x[i] * id);
        v = v > steps ? steps : v;
        v = v < -steps ? -steps : v;
        rounded[i] = v;
        sum += v;
    }
    for (i = 0; low && i < CP_GROUP; i++) {
        int32_t v = rounded[i];
        /* floor((v + 127) / 254), shifted to where division rounds down */
        rounded[i] = (v + 127 + CP_FIRST_TERM * 128) / CP_FIRST_TERM - 128;
        low[i] = (int8_t)(v - CP_FIRST_TERM * rounded[i]);
    }
    for (i = 0; i < CP_GROUP; i++)
        q[i] = (int8_t)rounded[i];
    *d = amax / (float)steps;
    *ds = *d * (float)sum;
    return 1;
}

int32_t cp_quantize(const float *x, int32_t rows, int32_t cols, int32_t terms, cp_acts *out)
{
    int32_t r, g;
    out->cols = cols;
    out->groups = cols / CP_GROUP;
    out->terms = terms;
    for (r = 0; r < rows; r++)
        for (g = 0; g < out->groups; g++) {
            size_t at = (size_t)r * (size_t)out->groups + (size_t)g;
            int8_t *q = out->q + (size_t)r * (size_t)cols * (size_t)terms + g * CP_GROUP;
            if (!quantize_group(x + at * CP_GROUP, q, terms == 2 ? q + cols : NULL, out->d + at,
                                out->ds + at))
                return r;
        }
    return -1;
}

void cp_multiply(const cp_path *path, const cp_matrix *m, const cp_acts *x, int32_t rows,
                 float *out, int32_t first_block, int32_t end_block)
{
    cp_block_fn *multiply = m->kind == CP_KIND_INT4 ? path->int4 : path->int8;
    uint64_t block_bytes = cp_block_bytes(m->kind, m->cols);
    uint64_t chunk_bytes = cp_chunk_bytes(m, m->chunk_rows);
    int32_t blocks_per_chunk = m->chunk_rows / CP_BLOCK;
    size_t stride = (size_t)m->rows;
    float padded[CP_TILE * CP_BLOCK];
    int32_t b, first, r;
    /* Blocks outside, batch inside: a block is read from memory once and stays in the first-level
     * cache while the rows of the batch pass over it. */
    for (b = first_block; b < end_block; b++) {
        const uint8_t *block = m->data + (uint64_t)(b / blocks_per_chunk) * chunk_bytes +
                               (uint64_t)(b % blocks_per_chunk) * block_bytes;
        int32_t left = m->rows - b * CP_BLOCK;
        for (first = 0; first < rows; first += CP_TILE) {
            int32_t n = rows - first < CP_TILE ? rows - first : CP_TILE;
            float *at = out + (size_t)first * stride + (size_t)b * CP_BLOCK;
            if (left >= CP_BLOCK) {
                multiply(block, x, first, n, at, stride);
                continue;
            }
            multiply(block, x, first, n, padded, CP_BLOCK);
            for (r = 0; r < n; r++)
                memcpy(at + (size_t)r * stride, padded + r * CP_BLOCK,
                       (size_t)left * sizeof(float));
        }
    }
}

static const cp_path *current_path(void)
{
    return &cp_path_portable;
}

void cp_multiply_all(const cp_matrix *m, const cp_acts *x, int32_t rows, float *out)
{
    cp_multiply(current_path(), m, x, rows, out, 0, (m->rows + CP_BLOCK - 1) / CP_BLOCK);
}
