/* Operations on rows with AVX2 and F16C. */
#ifndef CELLPIPE_ROWS_AVX2_H
#define CELLPIPE_ROWS_AVX2_H

#include "internal.h"

#define CP_FIRST_TERM_BITS 8 /* q = 256 * first + second, first in -126..126, second in -128..127 */

int cp_quantize_avx2(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d, int32_t *s);
float cp_dot8_avx2(const float *x, const float *y, int32_t n);
void cp_scale_by_avx2(const float *x, float factor, const float *weight, int32_t n, float *out);
void cp_rope_avx2(float *x, const float *cos, const float *sin, int32_t heads, int32_t head_dim,
                  int32_t half_pairing);
void cp_silu_mul_avx2(float *gate, const float *up, int32_t n);
void cp_add_to_avx2(float *x, const float *y, int32_t n);
int cp_all_finite_avx2(const float *x, int32_t n);
void cp_exp_avx2(const float *x, float *out, int32_t n);
void cp_to_half_avx2(const float *x, uint16_t *out, int32_t n);
void cp_from_half_avx2(const uint16_t *x, float *out, int32_t n);
void cp_widen_avx2(const uint16_t *keys, const uint16_t *values, int32_t n, int32_t head_dim,
                   float *tile);
int cp_attend_avx2(const float *q, int32_t num, const float *tile, int32_t head_dim, int32_t n,
                   float score_scale, float *max, float *total, float *acc);
uint64_t cp_read_avx2(const uint8_t *bytes, uint64_t n);

#endif
