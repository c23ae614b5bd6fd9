/* Quantised activations, and the walk over the chunks of a matrix. The inner loops are the path's. */
#include "internal.h"

#include <math.h> /* sqrtf, which IEEE 754 defines to the last bit */
#include <string.h>

#define PAIR_ROWS 5 /* of a batch: with fewer, reading weights is the limit, and one stream is enough */

static int32_t tile_rows(const cp_acts *acts, int32_t first)
{
    return acts->rows - first < CP_TILE ? acts->rows - first : CP_TILE;
}

/* `at` counts groups. */
static int16_t *wide_at(const cp_acts *acts, size_t at)
{
    size_t terms = acts->wide_per_term ? (size_t)acts->terms : 1;
    return acts->wide ? acts->wide + at * terms * CP_GROUP : NULL;
}

static int32_t takes_many(const cp_path *path, const cp_acts *acts)
{
    return path->int4_many && acts->rows >= path->many_rows;
}

int cp_quantize(const cp_path *path, const float *x, const cp_acts *acts, int32_t r, int32_t first,
                int32_t end)
{
    int32_t tile = r / CP_TILE * CP_TILE, n = tile_rows(acts, tile), terms = acts->terms, g;
    size_t tile_start = (size_t)tile * (size_t)(acts->cols / CP_GROUP);
    int32_t has_wide = n >= path->wide_rows && (!path->int4_many || takes_many(path, acts));
    for (g = first; g < end; g++) {
        size_t at = tile_start + (size_t)g * (size_t)n + (size_t)(r - tile);
        int8_t *q = acts->q + at * CP_GROUP * (size_t)terms;
        int16_t *wide = has_wide ? wide_at(acts, at) : NULL;
        int8_t *low = terms == 2 ? q + CP_GROUP : NULL;
        int32_t s;
        if (wide && acts->int4_only && path->int4_many)
            q = NULL;
        if (!path->quantize(x + (size_t)g * CP_GROUP, q, low, wide, acts->d + at, &s))
            return 0;
        acts->ds[at] = acts->d[at] * (float)s;
        acts->bias[at] = -128 * s;
    }
    return 1;
}

int cp_norm_quantized(const cp_path *path, const float *x, const float *weight, float eps,
                      float *norm, const cp_acts *acts, int32_t r)
{
    float ms = path->dot8(x, x, acts->cols) / (float)acts->cols;
    if (!path->all_finite(&ms, 1))
        return 0;
    path->scale_by(x, 1.0f / sqrtf(ms + eps), weight, acts->cols, norm);
    return cp_quantize(path, norm, acts, r, 0, acts->cols / CP_GROUP);
}

cp_tile cp_tile_of(const cp_acts *acts, int32_t first)
{
    cp_tile tile;
    int32_t groups = acts->cols / CP_GROUP;
    size_t at = (size_t)first * (size_t)groups;
    tile.q = acts->q + at * CP_GROUP * (size_t)acts->terms;
    tile.wide = wide_at(acts, at);
    tile.d = acts->d + at;
    tile.ds = acts->ds + at;
    tile.bias = acts->bias + at;
    tile.n = tile_rows(acts, first);
    tile.groups = groups;
    tile.cols = acts->cols;
    tile.terms = acts->terms;
    tile.passing = acts->passing;
    return tile;
}

const uint8_t *cp_block_at(const cp_matrix *m, int32_t b)
{
    int32_t blocks_per_chunk = m->chunk_rows / CP_BLOCK;
    return m->data + (uint64_t)(b / blocks_per_chunk) * cp_chunk_bytes(m, m->chunk_rows) +
           (uint64_t)(b % blocks_per_chunk) * cp_block_bytes(m->kind, m->cols);
}

/* Blocks b and b + 1 in one go, where the path has a way. */
static int32_t in_pairs(const cp_path *path, const cp_matrix *m, const cp_acts *x, int32_t b,
                        int32_t end_block)
{
    return path->int4_pair && m->kind == CP_KIND_INT4 && x->terms == 1 && b + 2 <= end_block &&
           m->rows - b * CP_BLOCK >= 2 * CP_BLOCK;
}

void cp_multiply(const cp_path *path, const cp_matrix *m, const cp_acts *x, float *out,
                 int32_t first_block, int32_t end_block)
{
    cp_block_fn *multiply = m->kind == CP_KIND_INT4 ? path->int4 : path->int8;
    size_t stride = (size_t)m->rows;
    float padded[CP_TILE * CP_BLOCK];
    int32_t done = 0, b = first_block, first, t;
    if (m->kind == CP_KIND_INT4 && takes_many(path, x))
        done = path->int4_many(m, x, out, first_block, end_block);
    if (done == x->rows)
        return;
    /* Blocks outside, batch inside: a block is read from memory once and stays in the first-level
     * cache while the tiles of the batch pass over it. */
    while (b < end_block) {
        int32_t left = m->rows - b * CP_BLOCK;
        int32_t blocks = x->rows - done >= PAIR_ROWS && in_pairs(path, m, x, b, end_block) ? 2 : 1;
        for (first = done; first < x->rows; first += CP_TILE) {
            cp_tile tile = cp_tile_of(x, first);
            float *at = out + (size_t)first * stride + (size_t)b * CP_BLOCK;
            if (blocks == 2) {
                path->int4_pair(cp_block_at(m, b), cp_block_at(m, b + 1), &tile, at, stride);
                continue;
            }
            if (left >= CP_BLOCK) {
                multiply(cp_block_at(m, b), &tile, at, stride);
                continue;
            }
            multiply(cp_block_at(m, b), &tile, padded, CP_BLOCK);
            for (t = 0; t < tile.n; t++)
                memcpy(at + (size_t)t * stride, padded + t * CP_BLOCK,
                       (size_t)left * sizeof(float));
        }
        b += blocks;
    }
}
