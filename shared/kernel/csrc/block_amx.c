/* Row blocks with AMX: one instruction multiplies 16 rows of the batch with 16 outputs over a whole
 * group of 32 inputs.
 *
 * Operands are bfloat16 and sums binary32, and yet nothing is rounded: int4 weights and terms of
 * activations are integers of at most 8 bits, products and their sums integers below 2^24 (of two
 * terms, 256 * high + low: at most 32 * 15 * 32,258), each of which binary32 holds. So a group's dot
 * product comes out as the number that it is, already converted. Scales and sums over groups are
 * AVX-512's, as in block_avx512.c, which also does what does not fill a tile.
 */
#include "internal.h"

#if defined(CP_AMX)
#include "attend_avx512.h"
#include "block_avx512.h"
#include "rows_avx512.h"
#include "vector_avx512.h"

#include <immintrin.h>
#include <string.h>

#define T __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) T
/* Of a batch, from which widening weights pays. SmolLM2 on a Xeon of 2023, forward and head, 2 threads
 * (1 thread), in turns, VNNI / tiles: 16 rows 15.7 / 16.8 ms (21.0 / 23.4), 32 rows 31.3 / 34.0
 * (43.4 / 43.9), 64 rows 37.9 / 34.9 (64.8 / 54.8), 128 rows 86.6 / 78.7 (137 / 111). */
#define MANY_ROWS 48
#define BLOCKS 2  /* row blocks that pass over a tile while it is in the first-level cache */
#define SEGMENT 6 /* groups at a time: weights of BLOCKS and a tile's activations fit that cache */
#define AHEAD 2   /* groups whose dot products are under way while another's are scaled */
#define SLOTS 4   /* that hold dot products; more than AHEAD, a power of two */
#define TILE_VALUES (CP_TILE * CP_BLOCK)
#define GROUP_WEIGHTS (CP_GROUP * CP_BLOCK)

#define TILE_LOAD(tile, from, apart)                                                               \
    __asm__ __volatile__("tileloadd (%0,%1,1), %%tmm" #tile                                        \
                         :                                                                         \
                         : "r"(from), "r"((int64_t)(apart))                                        \
                         : "memory")
#define TILE_STORE(tile, to)                                                                       \
    __asm__ __volatile__("tilestored %%tmm" #tile ", (%0,%1,1)"                                    \
                         :                                                                         \
                         : "r"(to), "r"((int64_t)64)                                               \
                         : "memory")
#define TILE_CLEAR(tile) __asm__ __volatile__("tilezero %%tmm" #tile ::)
#define TILE_ADD(sum, rows, weights)                                                               \
    __asm__ __volatile__("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum ::)

/* Eight tiles of 16 rows of 64 bytes. */
T static void start_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape;
    int i;
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (i = 0; i < 8; i++) {
        shape.row_bytes[i] = 64;
        shape.rows[i] = 16;
    }
    __asm__ __volatile__("ldtilecfg %0" : : "m"(shape));
}

/* The state of tiles need not be kept from here on. */
T static void end_tiles(void)
{
    __asm__ __volatile__("tilerelease" ::);
}

INLINE __m512 half16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* bfloat16 of 32 integers of at most 8 significant bits, in the order in which `widen_weights` takes
 * a block apart: pairs of inputs, from low and high nibbles of 16 bits. */
INLINE __m512i brain_floats(__m512i first, __m512i second)
{
    /* The upper half of value i is piece 2i + 1. */
    const __m512i order = _mm512_set_epi16(
        63, 59, 31, 27, 61, 57, 29, 25, 55, 51, 23, 19, 53, 49, 21, 17, 47, 43, 15, 11, 45, 41, 13,
        9, 39, 35, 7, 3, 37, 33, 5, 1);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(_mm512_cvtepi32_ps(first)), order,
                                     _mm512_castps_si512(_mm512_cvtepi32_ps(second)));
}

/* Two terms are 256 * high and low. */
INLINE void store_terms(__m512i first, __m512i second, int two, int16_t *wide)
{
    if (two) {
        const __m512i half_step = _mm512_set1_epi32(128), high_bits = _mm512_set1_epi32(-256);
        __m512i a = _mm512_and_si512(_mm512_add_epi32(first, half_step), high_bits);
        __m512i b = _mm512_and_si512(_mm512_add_epi32(second, half_step), high_bits);
        _mm512_storeu_si512(wide, brain_floats(a, b));
        wide += CP_GROUP;
        first = _mm512_sub_epi32(first, a);
        second = _mm512_sub_epi32(second, b);
    }
    _mm512_storeu_si512(wide, brain_floats(first, second));
}

/* `wide` gets what tiles multiply; q and low are only written where no tile is, or for int8. */
T static int quantize(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d, int32_t *s)
{
    __m512i whole[2];
    if (q && !cp_quantize_avx512(x, q, low, NULL, d, s))
        return 0;
    if (!wide)
        return 1;
    if (!cp_round_group_avx512(x, low ? CP_TWO_TERM_STEPS : 127, whole, d, s))
        return 0;
    store_terms(whole[0], whole[1], low != NULL, wide);
    return 1;
}

INLINE void prefetch(const uint8_t *p, const int lines)
{
    int i;
#pragma GCC unroll 5
    for (i = 0; i < lines; i++)
        _mm_prefetch((const char *)p + 64 * i, _MM_HINT_T0);
}

/* The bfloat16 weights of `groups` groups, [groups][32 inputs / 2][16 outputs][2]. */
INLINE void widen_weights(const uint8_t *group, int32_t groups, uint16_t *weights)
{
    /* 0..15, twice: only 5 bits of an index count, and the fifth is another weight's. */
    const __m512i numbers = _mm512_set_epi32(
        0x41704160, 0x41504140, 0x41304120, 0x41104100, 0x40e040c0, 0x40a04080, 0x40404000,
        0x3f800000, 0x41704160, 0x41504140, 0x41304120, 0x41104100, 0x40e040c0, 0x40a04080,
        0x40404000, 0x3f800000);
    int32_t g;
    int p, i;
    for (g = 0; g < groups; g++, group += CP_INT4_GROUP) {
        prefetch(group + SEGMENT * CP_INT4_GROUP, 5);
        for (p = 0; p < 4; p++) {
            __m512i quads = _mm512_loadu_si512(group + 64 + 64 * p);
#pragma GCC unroll 4
            for (i = 0; i < 4; i++, weights += 32) {
                _mm512_storeu_si512(weights, _mm512_permutexvar_epi16(quads, numbers));
                quads = _mm512_srli_epi16(quads, 4);
            }
        }
    }
}

INLINE void load_group(const uint16_t *q, const uint16_t *weights, const int terms)
{
    TILE_LOAD(4, weights, 64);
    TILE_LOAD(5, q, 64 * terms);
    if (terms == 2)
        TILE_LOAD(6, q + CP_GROUP, 128);
}

/* The dot products of what was loaded: two tiles of sums take turns. */
INLINE void multiply_group(const int terms, uint32_t number)
{
    if (number & 1) {
        TILE_CLEAR(1);
        TILE_ADD(1, 5, 4);
        if (terms == 2)
            TILE_ADD(1, 6, 4);
    } else {
        TILE_CLEAR(0);
        TILE_ADD(0, 5, 4);
        if (terms == 2)
            TILE_ADD(0, 6, 4);
    }
}

/* [16 rows][16 outputs] */
INLINE void store_dots(uint32_t number, float dots[SLOTS][TILE_VALUES])
{
    if (number & 1)
        TILE_STORE(1, dots[number % SLOTS]);
    else
        TILE_STORE(0, dots[number % SLOTS]);
}

/* a += (scale * d) * dot, for four rows. */
INLINE void add_dots(__m512 *a, __m512 scale, const float *d, const float *dots)
{
    int t;
#pragma GCC unroll 4
    for (t = 0; t < 4; t++)
        a[t] = _mm512_add_ps(a[t], _mm512_mul_ps(_mm512_mul_ps(scale, _mm512_set1_ps(d[t])),
                                                 _mm512_loadu_ps(dots + t * CP_BLOCK)));
}

/* The sums of mins, for all groups of a block: out [16 rows][16 outputs]. */
INLINE void sum_mins(const uint8_t *block, const cp_tile *x, float *out)
{
    const float *ds = x->ds;
    __m512 b[CP_TILE];
    int32_t g;
    int t;
#pragma GCC unroll 16
    for (t = 0; t < CP_TILE; t++)
        b[t] = _mm512_setzero_ps();
    for (g = 0; g < x->groups; g++, block += CP_INT4_GROUP, ds += CP_TILE) {
        __m512 min = half16(block + 32);
#pragma GCC unroll 16
        for (t = 0; t < CP_TILE; t++)
            b[t] = _mm512_add_ps(b[t], _mm512_mul_ps(min, _mm512_set1_ps(ds[t])));
    }
#pragma GCC unroll 16
    for (t = 0; t < CP_TILE; t++)
        _mm512_store_ps(out + t * CP_BLOCK, b[t]);
}

/* Some groups of some row blocks; `weights` are theirs, block after block. */
typedef struct {
    const uint8_t *blocks[BLOCKS];
    __mmask16 here[BLOCKS]; /* outputs that there are */
    const uint16_t *weights;
    int32_t num_blocks;
    int32_t first_group;
    int32_t num_groups;
} piece;

/* A piece times a full tile; out[t * stride + 16 * block + r] has the sums of the groups before. */
INLINE void piece_rows(const piece *w, const cp_tile *x, const int terms, float *out,
                       size_t stride)
{
    const int32_t last = w->first_group + w->num_groups == x->groups;
    const uint32_t total = (uint32_t)(w->num_blocks * w->num_groups);
    const size_t apart = (size_t)(CP_TILE * terms * CP_GROUP);
    const uint16_t *q = (const uint16_t *)x->wide + (size_t)w->first_group * apart;
    float dots[SLOTS][TILE_VALUES] __attribute__((aligned(64)));
    float mins[TILE_VALUES] __attribute__((aligned(64)));
    uint32_t i;
    int32_t b, g, ahead = 0;
    int t;
    for (i = 0; i < AHEAD && i < total; i++) {
        load_group(q + (size_t)ahead * apart, w->weights + (size_t)i * GROUP_WEIGHTS, terms);
        multiply_group(terms, i);
        if (i > 0)
            store_dots(i - 1, dots);
        ahead = ahead + 1 < w->num_groups ? ahead + 1 : 0;
    }
    if (total < AHEAD)
        store_dots(total - 1, dots);
    for (b = 0, i = 0; b < w->num_blocks; b++, out += CP_BLOCK) {
        const uint8_t *group = w->blocks[b] + (size_t)w->first_group * CP_INT4_GROUP;
        const float *d = x->d + (size_t)w->first_group * CP_TILE;
        const __mmask16 here = w->here[b];
        __m512 a[CP_TILE];
        if (last) /* kept for the end of this block */
            sum_mins(w->blocks[b], x, mins);
#pragma GCC unroll 16
        for (t = 0; t < CP_TILE; t++)
            a[t] = w->first_group ? _mm512_maskz_loadu_ps(here, out + (size_t)t * stride)
                                  : _mm512_setzero_ps();
        for (g = 0; g < w->num_groups; g++, i++, group += CP_INT4_GROUP, d += CP_TILE) {
            /* What tiles do stands between what vectors do: next to each other, the ones would wait
             * for the others. A product is stored when the next one has begun. */
            const float *ready = dots[i % SLOTS];
            const __m512 scale = half16(group);
            const int more = i + AHEAD < total;
            if (more)
                load_group(q + (size_t)ahead * apart,
                           w->weights + (size_t)(i + AHEAD) * GROUP_WEIGHTS, terms);
            add_dots(a, scale, d, ready);
            if (more)
                multiply_group(terms, i + AHEAD);
            add_dots(a + 4, scale, d + 4, ready + 4 * CP_BLOCK);
            add_dots(a + 8, scale, d + 8, ready + 8 * CP_BLOCK);
            if (i + AHEAD <= total)
                store_dots(i + AHEAD - 1, dots);
            add_dots(a + 12, scale, d + 12, ready + 12 * CP_BLOCK);
            ahead = ahead + 1 < w->num_groups ? ahead + 1 : 0;
        }
        if (last)
#pragma GCC unroll 16
            for (t = 0; t < CP_TILE; t++)
                a[t] = _mm512_add_ps(a[t], _mm512_load_ps(mins + t * CP_BLOCK));
#pragma GCC unroll 16
        for (t = 0; t < CP_TILE; t++)
            _mm512_mask_storeu_ps(out + (size_t)t * stride, here, a[t]);
    }
}

T static void piece_one(const piece *w, const cp_tile *x, float *out, size_t stride)
{
    piece_rows(w, x, 1, out, stride);
}

T static void piece_two(const piece *w, const cp_tile *x, float *out, size_t stride)
{
    piece_rows(w, x, 2, out, stride);
}

T static int32_t int4_many(const cp_matrix *m, const cp_acts *x, float *out, int32_t first_block,
                           int32_t end_block)
{
    uint16_t weights[BLOCKS * SEGMENT * GROUP_WEIGHTS] __attribute__((aligned(64)));
    int32_t groups = m->cols / CP_GROUP, rows = x->rows - x->rows % CP_TILE, b, i, first;
    if (!rows)
        return 0;
    start_tiles();
    for (b = first_block; b < end_block; b += BLOCKS) {
        piece w;
        w.weights = weights;
        w.num_blocks = end_block - b < BLOCKS ? end_block - b : BLOCKS;
        for (i = 0; i < w.num_blocks; i++) {
            int32_t left = m->rows - (b + i) * CP_BLOCK;
            w.blocks[i] = cp_block_at(m, b + i);
            w.here[i] = left < CP_BLOCK ? (__mmask16)((1u << left) - 1) : 0xffff;
        }
        for (w.first_group = 0; w.first_group < groups; w.first_group += SEGMENT) {
            w.num_groups = groups - w.first_group < SEGMENT ? groups - w.first_group : SEGMENT;
            for (i = 0; i < w.num_blocks; i++)
                widen_weights(w.blocks[i] + (size_t)w.first_group * CP_INT4_GROUP, w.num_groups,
                              weights + (size_t)(i * w.num_groups) * GROUP_WEIGHTS);
            for (first = 0; first < rows; first += CP_TILE) {
                cp_tile tile = cp_tile_of(x, first);
                (x->terms == 1 ? piece_one : piece_two)(
                    &w, &tile, out + (size_t)first * (size_t)m->rows + (size_t)b * CP_BLOCK,
                    (size_t)m->rows);
            }
        }
    }
    end_tiles();
    return rows;
}

/* Four tiles of sums. */
T static uint64_t peak(uint64_t rounds)
{
    uint64_t i;
    start_tiles();
    TILE_CLEAR(0);
    TILE_CLEAR(1);
    TILE_CLEAR(2);
    TILE_CLEAR(3);
    TILE_CLEAR(4);
    TILE_CLEAR(5);
    for (i = 0; i < rounds; i++) {
        TILE_ADD(0, 5, 4);
        TILE_ADD(1, 5, 4);
        TILE_ADD(2, 5, 4);
        TILE_ADD(3, 5, 4);
    }
    end_tiles();
    return rounds * 4 * CP_TILE * CP_BLOCK * CP_GROUP;
}

const cp_path cp_path_amx = {
    "amx", CP_TILE, 1, cp_block_int4_avx512, cp_block_int8_avx512, cp_pair_int4_avx512, int4_many, MANY_ROWS,
    quantize,
    cp_dot8_avx2, cp_scale_by_avx2, cp_rope_avx2, cp_silu_mul_avx512, cp_add_to_avx2,
    cp_all_finite_avx512, cp_exp_avx2, cp_to_half_avx2, cp_from_half_avx2, cp_widen_avx512,
    cp_attend_avx512, cp_attend_rows_avx512, peak, cp_read_avx2};

#else
typedef int cp_no_block_amx; /* a translation unit must not be empty */
#endif
