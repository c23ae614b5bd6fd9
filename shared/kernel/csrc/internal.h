/* What the kernel's own files share: quantised activations, and the table of block functions. */
#ifndef CELLPIPE_INTERNAL_H
#define CELLPIPE_INTERNAL_H

#include "cellpipe.h"

#define CP_GROUP 32      /* inputs that share a scale */
#define CP_BLOCK 16      /* outputs of a row block */
#define CP_PAGE 16       /* positions of a KV page */
#define CP_INT4_GROUP 320
#define CP_INT8_GROUP 512
#define CP_CHUNK_ALIGN 128
#define CP_FIRST_TERM 254 /* what the first of two terms of an activation counts */

/* Quantised activations of R rows; C cols, G = C/32. Quantised once for all matrices that share an
 * input (q, k, v; gate, up). One term: q itself. Two: 254 * first + second. */
typedef struct {
    int8_t *q;       /* (R, terms, C) */
    float *d;        /* (R, G) */
    float *ds;       /* (R, G): d * float(s) */
    int32_t cols;
    int32_t groups;
    int32_t terms;   /* 1 or 2 */
} cp_acts;

/* One instruction set's way to multiply a row block with rows first..first+n-1 of the activations:
 * out[b * out_stride + r] for 16 outputs r. n is at most CP_TILE. */
#define CP_TILE 8
typedef void cp_block_fn(const uint8_t *block, const cp_acts *x, int32_t first, int32_t n,
                         float *out, size_t out_stride);

typedef struct {
    const char *name;
    cp_block_fn *int4;
    cp_block_fn *int8;
} cp_path;

extern const cp_path cp_path_portable;

/* Geometry (geometry.c); 0 for a matrix that has none. */
uint64_t cp_block_bytes(int32_t kind, int32_t cols);
uint64_t cp_int8_scale_bytes(int32_t cols);
uint64_t cp_chunk_bytes(const cp_matrix *m, int32_t chunk_rows);
int cp_matrix_valid(const cp_matrix *m, int32_t rows, int32_t cols);
int cp_group_valid(const cp_group *group, cp_fault *fault);

/* Scratch memory is cut front to back into pieces aligned to 64 bytes. With base NULL nothing is
 * handed out and `used` tells what would be needed. */
typedef struct {
    uint8_t *base;
    uint64_t used;
} cp_arena;
void *cp_take(cp_arena *arena, uint64_t count, uint64_t size);
cp_acts cp_take_acts(cp_arena *arena, int32_t rows, int32_t cols, int32_t terms);

/* Quantise x (R, cols) to `terms` terms, at most as many as `out` was taken for. Returns -1, or the first row that holds a value that is not finite. */
int32_t cp_quantize(const float *x, int32_t rows, int32_t cols, int32_t terms, cp_acts *out);

/* out (R, m->rows) for row blocks first_block..end_block-1 (a slice, so that threads can share). */
void cp_multiply(const cp_path *path, const cp_matrix *m, const cp_acts *x, int32_t rows,
                 float *out, int32_t first_block, int32_t end_block);

/* The same for all blocks, by the best path. */
void cp_multiply_all(const cp_matrix *m, const cp_acts *x, int32_t rows, float *out);

/* -1, or the first row of x (rows, cols) that is not finite. */
int32_t cp_unfinished_row(const float *x, int32_t rows, int32_t cols);

/* Normalise rows into `norm` and quantise that. -1, or the row that is not finite. */
int32_t cp_norm_quantized(const float *x, const float *weight, float eps, int32_t rows,
                          int32_t cols, int32_t terms, float *norm, cp_acts *acts);

/* Operations on one row. Return 0 when a sum is not finite. */
int cp_rms_norm(const float *x, const float *weight, float eps, int32_t n, float *out);
void cp_rope(float *x, const float *cos, const float *sin, int32_t heads, int32_t head_dim,
             int32_t half_pairing);
void cp_silu_mul(float *gate, const float *up, int32_t n);

/* Attention of one sequence in one layer: q and out (rows, H * head_dim). `state` holds
 * 2 * rows * H floats, `tile` 2 * 16 * head_dim. Returns -1, or the row with a score that is not
 * finite. */
int32_t cp_attention(const cp_group *group, const cp_sequence *sequence, int32_t layer,
                     const float *q, float *out, float *state, float *tile);
void cp_store_kv(const cp_group *group, const cp_sequence *sequence, int32_t layer,
                 const float *k, const float *v);

#endif
