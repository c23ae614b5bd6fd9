/* The portable path: plain C99 in a shape that compilers turn into vector code.
 *
 * A slab of 64 bytes is 16 rows of 4 inputs. The 64 lanes are multiplied with 4 activations that
 * repeat, and summed in 16 bits as long as that is exact.
 */
#include "internal.h"
#include "numbers.h"

#define SLAB 64

static inline uint32_t half_at(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static void halves(const uint8_t *p, float out[CP_BLOCK])
{
    uint32_t h[CP_BLOCK];
    int r;
    for (r = 0; r < CP_BLOCK; r++)
        h[r] = half_at(p + 2 * r);
    for (r = 0; r < CP_BLOCK; r++)
        out[r] = cp_from_half1(h[r]);
}

/* The 4 lanes of each row. */
static inline void fold(const int16_t lane[SLAB], int32_t dot[CP_BLOCK])
{
    int r;
    for (r = 0; r < CP_BLOCK; r++)
        dot[r] += (int32_t)lane[4 * r] + lane[4 * r + 1] + lane[4 * r + 2] + lane[4 * r + 3];
}

static void block_int4(const uint8_t *block, const cp_acts *x, int32_t first, int32_t n,
                       float *out, size_t out_stride)
{
    float a[CP_TILE][CP_BLOCK] = {{0}}, b[CP_TILE][CP_BLOCK] = {{0}};
    int32_t g, t;
    int p, r, i;
    for (g = 0; g < x->groups; g++, block += CP_INT4_GROUP) {
        float scale[CP_BLOCK], min[CP_BLOCK];
        halves(block, scale);
        halves(block + 32, min);
        for (t = 0; t < n; t++) {
            size_t at = (size_t)(first + t) * (size_t)x->groups + (size_t)g;
            const int8_t *q = x->q + at * CP_GROUP;
            float d = x->d[at], ds = x->ds[at];
            int16_t lane[SLAB] = {0}; /* 8 products of at most 15 * 127 */
            int32_t dot[CP_BLOCK] = {0};
            for (p = 0; p < 4; p++) {
                const uint8_t *slab = block + 64 + SLAB * p;
                const int8_t *low = q + 4 * p, *high = q + 16 + 4 * p;
                for (r = 0; r < SLAB; r += 4)
                    for (i = 0; i < 4; i++)
                        lane[r + i] = (int16_t)(lane[r + i] + (slab[r + i] & 15) * low[i] +
                                                (slab[r + i] >> 4) * high[i]);
            }
            fold(lane, dot);
            for (r = 0; r < CP_BLOCK; r++) {
                a[t][r] += (scale[r] * d) * (float)dot[r];
                b[t][r] += min[r] * ds;
            }
        }
    }
    for (t = 0; t < n; t++)
        for (r = 0; r < CP_BLOCK; r++)
            out[(size_t)t * out_stride + (size_t)r] = a[t][r] + b[t][r];
}

static void block_int8(const uint8_t *block, const cp_acts *x, int32_t first, int32_t n,
                       float *out, size_t out_stride)
{
    const uint8_t *scales = block;
    float a[CP_TILE][CP_BLOCK] = {{0}};
    int32_t g, t;
    int p, r, i;
    block += cp_int8_scale_bytes(x->cols);
    for (g = 0; g < x->groups; g++, block += CP_INT8_GROUP) {
        const int8_t *w = (const int8_t *)block;
        float scale[CP_BLOCK];
        halves(scales + (size_t)g * CP_BLOCK * 2, scale);
        for (t = 0; t < n; t++) {
            size_t at = (size_t)(first + t) * (size_t)x->groups + (size_t)g;
            const int8_t *q = x->q + at * CP_GROUP;
            float d = x->d[at];
            int32_t dot[CP_BLOCK] = {0};
            for (p = 0; p < 8; p += 2) {
                int16_t lane[SLAB]; /* 2 products of at most 128 * 127 */
                const int8_t *even = w + SLAB * p, *odd = even + SLAB, *y = q + 4 * p;
                for (r = 0; r < SLAB; r += 4)
                    for (i = 0; i < 4; i++)
                        lane[r + i] = (int16_t)(even[r + i] * y[i] + odd[r + i] * y[4 + i]);
                fold(lane, dot);
            }
            for (r = 0; r < CP_BLOCK; r++)
                a[t][r] += (scale[r] * d) * (float)dot[r];
        }
    }
    for (t = 0; t < n; t++)
        for (r = 0; r < CP_BLOCK; r++)
            out[(size_t)t * out_stride + (size_t)r] = a[t][r];
}

const cp_path cp_path_portable = {"portable", block_int4, block_int8};
