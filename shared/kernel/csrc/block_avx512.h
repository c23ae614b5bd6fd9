/* Row blocks with AVX-512 VNNI. */
#ifndef CELLPIPE_BLOCK_AVX512_H
#define CELLPIPE_BLOCK_AVX512_H

#include "internal.h"

void cp_block_int4_avx512(const uint8_t *block, const cp_tile *x, float *out, size_t stride);
void cp_block_int8_avx512(const uint8_t *block, const cp_tile *x, float *out, size_t stride);

/* Blocks `first` and `second`, whose 32 outputs lie together. */
void cp_pair_int4_avx512(const uint8_t *first, const uint8_t *second, const cp_tile *x, float *out,
                         size_t stride);

#endif
