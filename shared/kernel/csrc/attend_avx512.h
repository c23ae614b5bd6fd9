/* Attention to one page with AVX-512. */
#ifndef CELLPIPE_ATTEND_AVX512_H
#define CELLPIPE_ATTEND_AVX512_H

#include "internal.h"

void cp_widen_avx512(const uint16_t *keys, const uint16_t *values, int32_t n, int32_t head_dim,
                     float *tile);
int cp_attend_avx512(const float *q, int32_t num, const float *tile, int32_t head_dim, int32_t n,
                     float score_scale, float *max, float *total, float *acc);
int cp_attend_rows_avx512(const float *columns, const float *tile, int32_t head_dim, int32_t first,
                          float score_scale, float *max, float *total, float *acc, size_t stride);

#endif
