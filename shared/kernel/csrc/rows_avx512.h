/* Operations on rows with AVX-512, where sixteen floats at a time pay. */
#ifndef CELLPIPE_ROWS_AVX512_H
#define CELLPIPE_ROWS_AVX512_H

#include "rows_avx2.h"

int cp_quantize_avx512(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d, int32_t *s);
void cp_silu_mul_avx512(float *gate, const float *up, int32_t n);
int cp_all_finite_avx512(const float *x, int32_t n);

#endif
