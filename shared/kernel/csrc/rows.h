/* Operations on rows in plain C99, for paths that have nothing better: compilers make vector code of
 * most of it. rows_avx2.c does the same by hand. */
#ifndef CELLPIPE_ROWS_H
#define CELLPIPE_ROWS_H

#include "internal.h"

#define CP_FIRST_TERM 254 /* then both terms lie in -127..127 */

int cp_quantize_c(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d, int32_t *s);
float cp_dot8_c(const float *x, const float *y, int32_t n);
void cp_scale_by_c(const float *x, float factor, const float *weight, int32_t n, float *out);
void cp_rope_c(float *x, const float *cos, const float *sin, int32_t heads, int32_t head_dim,
               int32_t half_pairing);
void cp_silu_mul_c(float *gate, const float *up, int32_t n);
void cp_add_to_c(float *x, const float *y, int32_t n);
int cp_all_finite_c(const float *x, int32_t n);
void cp_exp_c(const float *x, float *out, int32_t n);
void cp_to_half_c(const float *x, uint16_t *out, int32_t n);
void cp_from_half_c(const uint16_t *x, float *out, int32_t n);
void cp_widen_c(const uint16_t *keys, const uint16_t *values, int32_t n, int32_t head_dim,
                float *tile);
/* One query head against positions first..n-1 of a page; a soft cap of 0 is none. */
int cp_attend_part_c(const float *q, const float *tile, int32_t head_dim, int32_t first, int32_t n,
                     float score_scale, float score_softcap, float *max, float *total, float *acc);
int cp_attend_c(const float *q, int32_t num, const float *tile, int32_t head_dim, int32_t n,
                float score_scale, float *max, float *total, float *acc);
uint64_t cp_read_c(const uint8_t *bytes, uint64_t n);

#endif
