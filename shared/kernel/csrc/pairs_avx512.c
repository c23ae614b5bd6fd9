/* Two row blocks at once with AVX-512 VNNI: each activation is read once and multiplied with 32
 * outputs. A row block alone reads an operand from memory for every multiplication, and a Zen 5, which
 * multiplies twice a cycle, can read just as often: scales and sums then wait for their turn.
 */
#include "internal.h"

#if defined(CP_X86)
#include "block_avx512.h"

#include <immintrin.h>

#define T __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) T
#define ROWS 4 /* whose dot products with both blocks are under way together: 8 chains */
typedef int32_t __attribute__((may_alias)) word;

/* The two sums of each row, for the outputs of a block: of products, and of mins. In memory: dot
 * products and weights fill the registers. */
typedef struct {
    __m512 a[CP_TILE], b[CP_TILE];
} sums;

/* A group of a block. */
typedef struct {
    __m512i w[8];
    __m512 scale, min;
} weights;

INLINE __m512 half16(const uint8_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

INLINE weights take_group(const uint8_t *group)
{
    const __m512i low = _mm512_set1_epi8(15);
    weights u;
    int p;
#pragma GCC unroll 4
    for (p = 0; p < 4; p++) {
        __m512i pairs = _mm512_loadu_si512(group + 64 + 64 * p);
        u.w[p] = _mm512_and_si512(pairs, low);
        u.w[4 + p] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
    }
    u.scale = half16(group);
    u.min = half16(group + 32);
    return u;
}

/* even[t], odd[t] += products of a group's weights with the 32 activations of each row. */
INLINE void dot32(__m512i even[ROWS], __m512i odd[ROWS], const int n, const weights *u,
                  const weights *v, const int8_t *q)
{
    int p, t;
#pragma GCC unroll 8
    for (p = 0; p < 8; p++)
#pragma GCC unroll 4
        for (t = 0; t < n; t++) { /* asm: GCC 12 would move sums about */
            __m512i x = _mm512_set1_epi32(*(const word *)(q + t * CP_GROUP + 4 * p));
            __asm__("vpdpbusd %2, %1, %0" : "+v"(even[t]) : "v"(u->w[p]), "v"(x));
            __asm__("vpdpbusd %2, %1, %0" : "+v"(odd[t]) : "v"(v->w[p]), "v"(x));
        }
}

/* a += (scale * d) * dot; b += min * ds */
INLINE void add(sums *s, int t, const weights *u, __m512 d, __m512 ds, __m512i dot)
{
    s->a[t] = _mm512_add_ps(s->a[t], _mm512_mul_ps(_mm512_mul_ps(u->scale, d),
                                                   _mm512_cvtepi32_ps(dot)));
    s->b[t] = _mm512_add_ps(s->b[t], _mm512_mul_ps(u->min, ds));
}

/* Rows first..first+n-1 of a tile, one group. */
INLINE void some_rows(sums s[2], const int first, const int n, const weights *u, const weights *v,
                      const int8_t *q, const float *d, const float *ds)
{
    __m512i even[ROWS], odd[ROWS];
    int t;
#pragma GCC unroll 4
    for (t = 0; t < n; t++)
        even[t] = odd[t] = _mm512_setzero_si512();
    dot32(even, odd, n, u, v, q + first * CP_GROUP);
#pragma GCC unroll 4
    for (t = 0; t < n; t++) {
        __m512 x = _mm512_set1_ps(d[first + t]), y = _mm512_set1_ps(ds[first + t]);
        add(&s[0], first + t, u, x, y, even[t]);
        add(&s[1], first + t, v, x, y, odd[t]);
    }
    /* Or the compiler begins the next rows early, and spills these rows' dot products. */
    __asm__ __volatile__("" : : : "memory");
}

/* A group of the next two blocks: too far ahead for the first-level cache alone, so not where weights
 * pass by the others. */
INLINE void prefetch(const uint8_t *p)
{
    int i;
#pragma GCC unroll 5
    for (i = 0; i < CP_INT4_GROUP / 64; i++)
        _mm_prefetch((const char *)p + 64 * i, _MM_HINT_T0);
}

INLINE void all_rows(const uint8_t *first, const uint8_t *second, const cp_tile *x, const int n,
                     float *out, size_t stride)
{
    const int8_t *q = x->q;
    const float *d = x->d, *ds = x->ds;
    sums s[2];
    int32_t g, t;
    const size_t apart = 2 * (size_t)(second - first);
    for (t = 0; t < n; t++)
        s[0].a[t] = s[0].b[t] = s[1].a[t] = s[1].b[t] = _mm512_setzero_ps();
    for (g = 0; g < x->groups; g++, first += CP_INT4_GROUP, second += CP_INT4_GROUP) {
        weights u = take_group(first), v = take_group(second);
        if (!x->passing) {
            prefetch(first + apart);
            prefetch(second + apart);
        }
        for (t = 0; t + ROWS <= n; t += ROWS)
            some_rows(s, t, ROWS, &u, &v, q, d, ds);
        if (n & 2) {
            some_rows(s, t, 2, &u, &v, q, d, ds);
            t += 2;
        }
        if (n & 1)
            some_rows(s, t, 1, &u, &v, q, d, ds);
        q += n * CP_GROUP;
        d += n;
        ds += n;
    }
    for (t = 0; t < n; t++) {
        float *at = out + (size_t)t * stride;
        _mm512_storeu_ps(at, _mm512_add_ps(s[0].a[t], s[0].b[t]));
        _mm512_storeu_ps(at + CP_BLOCK, _mm512_add_ps(s[1].a[t], s[1].b[t]));
    }
}

T void cp_pair_int4_avx512(const uint8_t *first, const uint8_t *second, const cp_tile *x,
                           float *out, size_t stride)
{
    if (x->n == CP_TILE)
        all_rows(first, second, x, CP_TILE, out, stride);
    else
        all_rows(first, second, x, x->n, out, stride);
}

#else
typedef int cp_no_pairs_avx512; /* a translation unit must not be empty */
#endif
