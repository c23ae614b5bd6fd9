/* The portable path: plain C99 in a shape that compilers turn into vector code.
 *
 * A slab of 64 bytes is 16 rows of 4 inputs. The 64 lanes are multiplied with 4 activations that
 * repeat, and summed in 16 bits as long as that is exact.
 */
#include "numbers.h"
#include "rows.h"

#include <string.h>

#define SLAB 64

static inline void halves(const uint8_t *p, float out[CP_BLOCK])
{
    uint16_t h[CP_BLOCK];
    int r;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(h, p, sizeof h);
#else
    for (r = 0; r < CP_BLOCK; r++)
        h[r] = (uint16_t)(p[2 * r] | p[2 * r + 1] << 8);
#endif
    for (r = 0; r < CP_BLOCK; r++)
        out[r] = cp_from_half1(h[r]);
}

/* 4 activations, repeated. */
static inline void repeat4(const int8_t *q, int16_t out[16])
{
    int j;
    for (j = 0; j < 16; j++)
        out[j] = q[j & 3];
}

/* Adds neighbouring lanes, two a row, to `pair`. */
static inline void add_pairs(const int16_t lane[SLAB], int32_t pair[SLAB / 2])
{
    uint32_t word[SLAB / 2];
    int w;
    memcpy(word, lane, sizeof word);
    for (w = 0; w < SLAB / 2; w++)
        pair[w] += (int32_t)(int16_t)(word[w] & 0xffffu) + (int32_t)(int16_t)(word[w] >> 16);
}

static inline void add_rows(const int32_t pair[SLAB / 2], int32_t dot[CP_BLOCK])
{
    int r;
    for (r = 0; r < CP_BLOCK; r++)
        dot[r] = pair[2 * r] + pair[2 * r + 1];
}

/* The 16 dot products of a group with 32 activations. */
typedef void dot_fn(const uint8_t *slabs, const int8_t *q, int32_t dot[CP_BLOCK]);

static inline void dot_int4(const uint8_t *slabs, const int8_t *q, int32_t dot[CP_BLOCK])
{
    int16_t lane[SLAB] = {0}; /* 8 products of at most 15 * 127 */
    int32_t pair[SLAB / 2] = {0};
    int p, r, i;
    for (p = 0; p < 4; p++) {
        const uint8_t *slab = slabs + SLAB * p;
        int16_t low[16], high[16];
        repeat4(q + 4 * p, low);
        repeat4(q + 16 + 4 * p, high);
        for (r = 0; r < SLAB; r += 16)
            for (i = 0; i < 16; i++)
                lane[r + i] = (int16_t)(lane[r + i] + (slab[r + i] & 15) * low[i] +
                                        (slab[r + i] >> 4) * high[i]);
    }
    add_pairs(lane, pair);
    add_rows(pair, dot);
}

static inline void dot_int8(const uint8_t *slabs, const int8_t *q, int32_t dot[CP_BLOCK])
{
    const int8_t *w = (const int8_t *)slabs;
    int32_t pair[SLAB / 2] = {0};
    int p, r, i;
    for (p = 0; p < 8; p += 2) {
        int16_t lane[SLAB]; /* 2 products of at most 128 * 127 */
        const int8_t *even = w + SLAB * p, *odd = even + SLAB;
        int16_t y[16], z[16];
        repeat4(q + 4 * p, y);
        repeat4(q + 4 * p + 4, z);
        for (r = 0; r < SLAB; r += 16)
            for (i = 0; i < 16; i++)
                lane[r + i] = (int16_t)(even[r + i] * y[i] + odd[r + i] * z[i]);
        add_pairs(lane, pair);
    }
    add_rows(pair, dot);
}

/* a += (scale * d) * dot for group g of row t of a tile. */
static inline void add_group(dot_fn *dot_of, const uint8_t *slabs, const cp_tile *x, int32_t t,
                             int32_t g, const float scale[CP_BLOCK], float a[CP_BLOCK])
{
    size_t at = (size_t)g * (size_t)x->n + (size_t)t;
    const int8_t *q = x->q + at * CP_GROUP * (size_t)x->terms;
    float d = x->d[at];
    int32_t dot[CP_BLOCK], low[CP_BLOCK];
    int r;
    dot_of(slabs, q, dot);
    if (x->terms == 2) {
        dot_of(slabs, q + CP_GROUP, low);
        for (r = 0; r < CP_BLOCK; r++)
            dot[r] = CP_FIRST_TERM * dot[r] + low[r];
    }
    for (r = 0; r < CP_BLOCK; r++)
        a[r] += (scale[r] * d) * (float)dot[r];
}

static void block_int4(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    float a[CP_TILE][CP_BLOCK] = {{0}}, b[CP_TILE][CP_BLOCK] = {{0}};
    int32_t g, t;
    int r;
    for (g = 0; g < x->groups; g++, block += CP_INT4_GROUP) {
        float scale[CP_BLOCK], min[CP_BLOCK];
        halves(block, scale);
        halves(block + 32, min);
        for (t = 0; t < x->n; t++) {
            float ds = x->ds[g * x->n + t];
            add_group(dot_int4, block + 64, x, t, g, scale, a[t]);
            for (r = 0; r < CP_BLOCK; r++)
                b[t][r] += min[r] * ds;
        }
    }
    for (t = 0; t < x->n; t++)
        for (r = 0; r < CP_BLOCK; r++)
            out[(size_t)t * stride + (size_t)r] = a[t][r] + b[t][r];
}

static void block_int8(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    const uint8_t *scales = block;
    float a[CP_TILE][CP_BLOCK] = {{0}};
    int32_t g, t;
    int r;
    block += cp_int8_scale_bytes(x->cols);
    for (g = 0; g < x->groups; g++, block += CP_INT8_GROUP) {
        float scale[CP_BLOCK];
        halves(scales + (size_t)g * CP_BLOCK * 2, scale);
        for (t = 0; t < x->n; t++)
            add_group(dot_int8, block, x, t, g, scale, a[t]);
    }
    for (t = 0; t < x->n; t++)
        for (r = 0; r < CP_BLOCK; r++)
            out[(size_t)t * stride + (size_t)r] = a[t][r];
}

/* Multiply-adds of two slabs in registers. */
static uint64_t peak(uint64_t rounds)
{
    static const uint8_t slabs[4 * SLAB] = {1, 2, 3};
    int8_t q[CP_GROUP] = {1, 2, 3};
    volatile int32_t kept;
    int32_t dot[CP_BLOCK], sum = 0;
    uint64_t i;
    for (i = 0; i < rounds; i++) {
        q[0] = (int8_t)(sum & 1);
        dot_int4(slabs, q, dot);
        sum += dot[0];
    }
    kept = sum;
    (void)kept;
    return rounds * CP_BLOCK * CP_GROUP;
}

const cp_path cp_path_portable = {
    "portable", 0, 0, block_int4, block_int8, NULL, NULL, 0, cp_quantize_c, cp_dot8_c, cp_scale_by_c,
    cp_rope_c, cp_silu_mul_c, cp_add_to_c, cp_all_finite_c, cp_exp_c, cp_to_half_c, cp_from_half_c,
    cp_widen_c, cp_attend_c, NULL, peak, cp_read_c};
