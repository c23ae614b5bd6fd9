/* Row blocks with AVX-512 VNNI: a slab of 16 rows x 4 inputs is one register, and one instruction
 * multiplies it with 4 activations and sums them into 16 dot products.
 *
 * Weights are the unsigned operand, activations the signed one, read from memory as they are. int4
 * weights are 0..15; int8 weights have 128 added (the top bit flipped), which adds 128 * s to a dot
 * product and is taken away as the tile's bias.
 */
#include "internal.h"

#if defined(CP_X86)
#include "attend_avx512.h"
#include "block_avx512.h"
#include "rows_avx512.h"

#include <immintrin.h>

#define T __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) T
#define AHEAD_INT4 4096 /* bytes that are fetched ahead of a stream of weights */
#define AHEAD_INT8 6144 /* the same, of a stream that is computed faster */
typedef int32_t __attribute__((may_alias)) word;

INLINE __m512 half16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* sum[t] += the products of 8 slabs with 32 activations, which lie `apart` bytes from row to row. Row
 * after row inside a slab: one row's sum would wait 5 cycles for each of its 8 steps, and the CPU's
 * scheduler cannot look far enough ahead to find other rows' steps. */
INLINE void dot32(__m512i sum[CP_TILE], const int n, const __m512i w[8], const int8_t *q,
                  const int apart)
{
    int p, t;
#pragma GCC unroll 8
    for (p = 0; p < 8; p++)
#pragma GCC unroll 16
        for (t = 0; t < n; t++) {
            const word *quad = (const word *)(q + t * apart + 4 * p);
            /* The intrinsic would become two instructions and a register. */
            __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum[t]) : "v"(w[p]), "m"(*quad));
        }
}

/* Weights that will have left the caches anyway pass them by, and spare what others keep there. */
INLINE void prefetch(const uint8_t *p, const int lines, int32_t passing)
{
    int i;
#pragma GCC unroll 8
    for (i = 0; i < lines; i++) {
        if (passing)
            _mm_prefetch((const char *)p + 64 * i, _MM_HINT_NTA);
        else
            _mm_prefetch((const char *)p + 64 * i, _MM_HINT_T0);
    }
}

/* The two sums of a row: of products, and of mins. */
typedef struct {
    __m512 a[CP_TILE], b[CP_TILE];
} sums;

INLINE void clear(sums *s, const int n)
{
    int t;
#pragma GCC unroll 16
    for (t = 0; t < n; t++)
        s->a[t] = s->b[t] = _mm512_setzero_ps();
}

/* a += (scale * d) * dot */
INLINE void add_dots(sums *s, const int n, __m512 scale, const float *d, const __m512i *dot)
{
    int t;
#pragma GCC unroll 16
    for (t = 0; t < n; t++)
        s->a[t] = _mm512_add_ps(s->a[t],
                                _mm512_mul_ps(_mm512_mul_ps(scale, _mm512_set1_ps(d[t])),
                                              _mm512_cvtepi32_ps(dot[t])));
}

/* b += min * (d * s) */
INLINE void add_mins(sums *s, const int n, __m512 min, const float *ds)
{
    int t;
#pragma GCC unroll 16
    for (t = 0; t < n; t++)
        s->b[t] = _mm512_add_ps(s->b[t], _mm512_mul_ps(min, _mm512_set1_ps(ds[t])));
}

/* Sums of many rows stay in memory, so that the dot products of all rows fit the registers. The
 * compiler would keep some sums and spill dot products. */
#define KEEP_IN_MEMORY(n)                                                                              do {                                                                                                   if ((n) > 4)                                                                                           __asm__ __volatile__("" : : : "memory");                                                   } while (0)

/* Rows first..first+n-1 of the tile. */
INLINE void int4_rows(const uint8_t *block, const cp_tile *x, int32_t first, const int n,
                      const int terms, float *out, size_t stride)
{
    const __m512i low = _mm512_set1_epi8(15);
    const int8_t *q = x->q + (size_t)(first * terms * CP_GROUP);
    const float *d = x->d + first, *ds = x->ds + first;
    const int apart = terms * CP_GROUP;
    sums s;
    int32_t g;
    int t, p;
    clear(&s, n);
    for (g = 0; g < x->groups; g++, block += CP_INT4_GROUP) {
        __m512i w[8], dot[CP_TILE];
        if (n <= 4 || !x->passing)
            prefetch(block + AHEAD_INT4, 5, x->passing);
#pragma GCC unroll 4
        for (p = 0; p < 4; p++) {
            __m512i pairs = _mm512_loadu_si512(block + 64 + 64 * p);
            w[p] = _mm512_and_si512(pairs, low);
            w[4 + p] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
        }
#pragma GCC unroll 16
        for (t = 0; t < n; t++)
            dot[t] = _mm512_setzero_si512();
        dot32(dot, n, w, q, apart);
        if (terms == 2) {
#pragma GCC unroll 16
            for (t = 0; t < n; t++)
                dot[t] = _mm512_slli_epi32(dot[t], CP_FIRST_TERM_BITS);
            dot32(dot, n, w, q + CP_GROUP, apart);
        }
        add_mins(&s, n, half16(block + 32), ds);
        add_dots(&s, n, half16(block), d, dot);
        KEEP_IN_MEMORY(n);
        q += x->n * apart;
        d += x->n;
        ds += x->n;
    }
#pragma GCC unroll 16
    for (t = 0; t < n; t++)
        _mm512_storeu_ps(out + (size_t)t * stride, _mm512_add_ps(s.a[t], s.b[t]));
}

INLINE void int8_rows(const uint8_t *block, const cp_tile *x, int32_t first, const int n,
                      const int terms, float *out, size_t stride)
{
    const __m512i top_bits = _mm512_set1_epi8((char)0x80);
    const uint8_t *slabs = block + cp_int8_scale_bytes(x->cols);
    const int8_t *q = x->q + (size_t)(first * terms * CP_GROUP);
    const float *d = x->d + first;
    const int32_t *bias = x->bias + first;
    const int apart = terms * CP_GROUP;
    sums s;
    int32_t g;
    int t, p;
    clear(&s, n);
    for (g = 0; g < x->groups; g++, slabs += CP_INT8_GROUP) {
        __m512i w[8], dot[CP_TILE];
        if (n <= 4 || !x->passing)
            prefetch(slabs + AHEAD_INT8, 8, x->passing);
#pragma GCC unroll 8
        for (p = 0; p < 8; p++)
            w[p] = _mm512_xor_si512(_mm512_loadu_si512(slabs + 64 * p), top_bits);
#pragma GCC unroll 16
        for (t = 0; t < n; t++)
            dot[t] = terms == 2 ? _mm512_setzero_si512() : _mm512_set1_epi32(bias[t]);
        dot32(dot, n, w, q, apart);
        if (terms == 2) {
#pragma GCC unroll 16
            for (t = 0; t < n; t++)
                dot[t] = _mm512_add_epi32(_mm512_slli_epi32(dot[t], CP_FIRST_TERM_BITS),
                                          _mm512_set1_epi32(bias[t]));
            dot32(dot, n, w, q + CP_GROUP, apart);
        }
        add_dots(&s, n, half16(block + g * CP_BLOCK * 2), d, dot);
        KEEP_IN_MEMORY(n);
        q += x->n * apart;
        d += x->n;
        bias += x->n;
    }
#pragma GCC unroll 16
    for (t = 0; t < n; t++)
        _mm512_storeu_ps(out + (size_t)t * stride, s.a[t]);
}

/* A tile of any size is cut into pieces that are compiled for their size. */
#define PIECES(NAME, ROWS, TERMS)                                                                  \
    T static void NAME(const uint8_t *block, const cp_tile *x, float *out, size_t stride)          \
    {                                                                                              \
        int32_t t = 0;                                                                             \
        if (x->n == 16) {                                                                          \
            ROWS(block, x, 0, 16, TERMS, out, stride);                                             \
            return;                                                                                \
        }                                                                                          \
        if (x->n & 8) {                                                                            \
            ROWS(block, x, 0, 8, TERMS, out, stride);                                              \
            t = 8;                                                                                 \
        }                                                                                          \
        if (x->n & 4) {                                                                            \
            ROWS(block, x, t, 4, TERMS, out + (size_t)t * stride, stride);                         \
            t += 4;                                                                                \
        }                                                                                          \
        if (x->n & 2) {                                                                            \
            ROWS(block, x, t, 2, TERMS, out + (size_t)t * stride, stride);                         \
            t += 2;                                                                                \
        }                                                                                          \
        if (x->n & 1)                                                                              \
            ROWS(block, x, t, 1, TERMS, out + (size_t)t * stride, stride);                         \
    }

PIECES(int4_one, int4_rows, 1)
PIECES(int4_two, int4_rows, 2)
PIECES(int8_one, int8_rows, 1)
PIECES(int8_two, int8_rows, 2)

void cp_block_int4_avx512(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    (x->terms == 1 ? int4_one : int4_two)(block, x, out, stride);
}

void cp_block_int8_avx512(const uint8_t *block, const cp_tile *x, float *out, size_t stride)
{
    (x->terms == 1 ? int8_one : int8_two)(block, x, out, stride);
}

/* Twenty sums, so that none waits for its predecessor. */
T static uint64_t peak(uint64_t rounds)
{
    __m512i sum[20], w = _mm512_set1_epi8(3), q = _mm512_set1_epi8(5);
    uint64_t i;
    int j;
#pragma GCC unroll 20
    for (j = 0; j < 20; j++)
        sum[j] = _mm512_setzero_si512();
    for (i = 0; i < rounds; i++) {
#pragma GCC unroll 20
        for (j = 0; j < 20; j++)
            sum[j] = _mm512_dpbusd_epi32(sum[j], w, q);
#pragma GCC unroll 20
        for (j = 0; j < 20; j++)
            __asm__ __volatile__("" : "+v"(sum[j]));
    }
    return rounds * 20 * 64;
}

const cp_path cp_path_avx512vnni = {
    "avx512vnni", 0, 0, cp_block_int4_avx512, cp_block_int8_avx512, cp_pair_int4_avx512, NULL, 0,
    cp_quantize_avx512, cp_dot8_avx2, cp_scale_by_avx2, cp_rope_avx2, cp_silu_mul_avx512, cp_add_to_avx2, cp_all_finite_avx512, cp_exp_avx2,
    cp_to_half_avx2, cp_from_half_avx2, cp_widen_avx512, cp_attend_avx512, cp_attend_rows_avx512, peak, cp_read_avx2};

#else
typedef int cp_no_block_avx512; /* a translation unit must not be empty */
#endif
