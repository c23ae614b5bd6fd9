/* What the kernel's own files share: quantised activations, instruction-set paths, threads. */
#ifndef CELLPIPE_INTERNAL_H
#define CELLPIPE_INTERNAL_H

#include "cellpipe.h"

#define CP_GROUP 32      /* inputs that share a scale */
#define CP_BLOCK 16      /* outputs of a row block */
#define CP_PAGE 16       /* positions of a KV page */
#define CP_TILE 16       /* batch rows that share one unpacking of the weights */
#define CP_ATTENTION_ROWS 16 /* of a sequence, that read a page together */
#define CP_INT4_GROUP 320
#define CP_INT8_GROUP 512
#define CP_CHUNK_ALIGN 128
#define CP_TWO_TERM_STEPS 32258 /* the largest |q| of an activation of two terms */

/* Quantised activations of R rows; C cols, G = C/32. Quantised once for all matrices that share an
 * input (q, k, v; gate, up). One term: q itself. Two: q = CP_FIRST_TERM * first + second, which paths
 * choose for themselves, as no result depends on it.
 *
 * Rows lie in tiles of CP_TILE, the last one shorter: all that a tile of n rows needs of one group
 * lies together, so that inner loops reach every row at a constant distance. */
typedef struct {
    int8_t *q;     /* per tile [G][n][terms][32] */
    int16_t *wide; /* what else the path wants of q: per tile [G][n], see `quantize`; or NULL */
    float *d;      /* per tile [G][n] */
    float *ds;     /* per tile [G][n]: d * float(s) */
    int32_t *bias; /* per tile [G][n]: -128 * s, for products with weights that are 128 too large */
    int32_t rows;
    int32_t cols;
    int32_t terms;
    int32_t wide_per_term; /* the path's */
    int32_t int4_only;     /* no matrix of int8 is multiplied with them */
    int32_t passing;       /* weights that meet them will have left the caches when they are read again */
} cp_acts;

/* One tile of them. */
typedef struct {
    const int8_t *q;
    const int16_t *wide;
    const float *d;
    const float *ds;
    const int32_t *bias;
    int32_t n;
    int32_t groups;
    int32_t cols;
    int32_t terms;
    int32_t passing;
} cp_tile;

/* One instruction set's way to do things; all give the same bits.
 *
 * int4, int8: a row block times a tile, out[t * stride + r] for 16 outputs r.
 * int4_pair: NULL, or two row blocks, whose 32 outputs lie together, times a tile of one term.
 * int4_many: NULL, or row blocks of an int4 matrix times the first rows of a batch of `many_rows` or
 * more, out (R, m->rows); returns how many rows. The others (part of one tile) are left to int4.
 * quantize: one group of 32 values; returns 0 if one is not finite. `low` and `wide` may be NULL, and
 * q where int4_many takes `wide` in its place; with `low` there are two terms.
 * `wide` is q in one piece (avx2), or what block_amx.c multiplies.
 * attend: `num` query heads, head_dim apart, of one row against the first n positions of a page in
 * `tile`, which `widen` has made from a page's keys and values; returns 0 if a score is not finite.
 * attend_rows: NULL, or the same for one head of CP_ATTENTION_ROWS consecutive rows, (head_dim, rows) in
 * `columns`; acc is `stride` apart. Row r sees the positions up to first + r of the page, at least one;
 * returns the mask of rows with a score that is not finite.
 */
typedef void cp_block_fn(const uint8_t *block, const cp_tile *x, float *out, size_t stride);
typedef void cp_pair_fn(const uint8_t *first, const uint8_t *second, const cp_tile *x, float *out,
                        size_t stride);
typedef int32_t cp_blocks_fn(const cp_matrix *m, const cp_acts *x, float *out, int32_t first_block,
                             int32_t end_block);
typedef struct {
    const char *name;
    int32_t wide_rows;      /* 0: no tile has `wide` */
    int32_t wide_per_term;  /* whether there are 32 for each term, not 32 */
    cp_block_fn *int4;
    cp_block_fn *int8;
    cp_pair_fn *int4_pair;
    cp_blocks_fn *int4_many;
    int32_t many_rows;
    int (*quantize)(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d, int32_t *s);
    float (*dot8)(const float *x, const float *y, int32_t n);
    void (*scale_by)(const float *x, float factor, const float *weight, int32_t n, float *out);
    void (*rope)(float *x, const float *cos, const float *sin, int32_t heads, int32_t head_dim,
                 int32_t half_pairing);
    void (*silu_mul)(float *gate, const float *up, int32_t n);
    void (*add_to)(float *x, const float *y, int32_t n);
    int (*all_finite)(const float *x, int32_t n);
    void (*exp)(const float *x, float *out, int32_t n);
    void (*to_half)(const float *x, uint16_t *out, int32_t n);
    void (*from_half)(const uint16_t *x, float *out, int32_t n);
    void (*widen)(const uint16_t *keys, const uint16_t *values, int32_t n, int32_t head_dim,
                  float *tile);
    int (*attend)(const float *q, int32_t num, const float *tile, int32_t head_dim, int32_t n,
                  float score_scale, float *max, float *total, float *acc);
    int (*attend_rows)(const float *columns, const float *tile, int32_t head_dim, int32_t first,
                       float score_scale, float *max, float *total, float *acc, size_t stride);
    uint64_t (*peak)(uint64_t rounds);
    uint64_t (*read)(const uint8_t *bytes, uint64_t n);
} cp_path;

extern const cp_path cp_path_portable;
#if defined(__x86_64__) && defined(__GNUC__)
#define CP_X86 1
extern const cp_path cp_path_avx2, cp_path_avx512vnni;
#endif
#if defined(CP_X86) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define CP_AMX 1
extern const cp_path cp_path_amx;
#endif
#if defined(__aarch64__) && defined(__GNUC__) && defined(__linux__) && !defined(__AARCH64EB__)
#define CP_NEON 1
extern const cp_path cp_path_neon;
#endif
const cp_path *cp_path_at(int32_t index); /* NULL if this CPU lacks it */

/* Threads that run one function together (threads.c). */
typedef struct cp_team cp_team;
typedef void cp_work(cp_team *team, int32_t me, void *context);
struct cp_team {
    int32_t size;
    int32_t stop;     /* what `bad` was when the last barrier was passed: the same for all */
    uint32_t bad;     /* least row that is not finite; UINT32_MAX if none */
    uint32_t next;    /* next unit of work that is handed out; 0 after a barrier */
    uint32_t arrived, phase;
    struct cp_engine *engine;
};
const cp_path *cp_engine_path(const cp_engine *engine);
/* Whether that many bytes of weights, read in turn with as many others, outgrow the last level of caches. */
int32_t cp_passes_by(const cp_engine *engine, uint64_t weight_bytes);
/* 0 where nothing tells (caches.c). */
uint64_t cp_last_level_bytes(void);
int32_t cp_engine_threads(const cp_engine *engine);
/* Returns the least bad row, or -1. */
int32_t cp_run(cp_engine *engine, cp_work *work, void *context);
/* Waits until all have come. Returns whether a row was found bad so far. */
int cp_barrier(cp_team *team);
void cp_blame(cp_team *team, int32_t row);
int32_t cp_next_unit(cp_team *team);
/* The part of 0..total-1 that belongs to thread `me`, cut at multiples of `unit`. */
void cp_share(const cp_team *team, int32_t me, int32_t total, int32_t unit, int32_t *first,
              int32_t *end);

/* Geometry (geometry.c); 0 for a matrix that has none. */
uint64_t cp_block_bytes(int32_t kind, int32_t cols);
uint64_t cp_int8_scale_bytes(int32_t cols);
uint64_t cp_chunk_bytes(const cp_matrix *m, int32_t chunk_rows);
int32_t cp_num_blocks(const cp_matrix *m);
int cp_matrix_valid(const cp_matrix *m, int32_t rows, int32_t cols);
int cp_group_valid(const cp_group *group, cp_fault *fault);
/* -1, or the sequence whose positions lie outside the rope tables or its pages. */
int32_t cp_misplaced_sequence(const cp_group *g, const cp_sequence *sequences, int32_t n);

/* Scratch memory is cut front to back into pieces aligned to 64 bytes. With base NULL nothing is
 * handed out and `used` tells what would be needed. */
typedef struct {
    uint8_t *base;
    uint64_t used;
} cp_arena;
void *cp_take(cp_arena *arena, uint64_t count, uint64_t size);
cp_acts cp_take_acts(cp_arena *arena, const cp_path *path, int32_t rows, int32_t cols,
                     int32_t terms, int32_t int4_only, int32_t passing);

/* Quantise groups first..end-1 of row r, whose values are x (cols). Returns 0 if one of them is not
 * finite. */
int cp_quantize(const cp_path *path, const float *x, const cp_acts *acts, int32_t r, int32_t first,
                int32_t end);

cp_tile cp_tile_of(const cp_acts *acts, int32_t first_row);
/* Row block b of a matrix. */
const uint8_t *cp_block_at(const cp_matrix *m, int32_t b);

/* out (R, m->rows) for row blocks first_block..end_block-1. */
void cp_multiply(const cp_path *path, const cp_matrix *m, const cp_acts *x, float *out,
                 int32_t first_block, int32_t end_block);

/* Normalise a row into `norm` and quantise that. Returns 0 if a value is not finite. */
int cp_norm_quantized(const cp_path *path, const float *x, const float *weight, float eps,
                      float *norm, const cp_acts *acts, int32_t r);

/* gate = gelu_tanh(gate) * up; n is a multiple of 32. */
void cp_gelu_mul_on(const cp_path *path, float *gate, const float *up, int32_t n);

/* Write the keys and values (K * head_dim each) of one position. */
void cp_store_kv(const cp_path *path, const cp_group *g, const cp_sequence *s, int32_t layer,
                 int64_t position, const float *k, const float *v);

/* Rows first_row..end_row-1 of a sequence, query heads first_head..end_head-1 of one kv head, in one
 * layer: q and out (rows, H * head_dim). `tile` holds 2 * 16 * head_dim floats (twice that with a
 * window or a soft cap), `state` 2 floats a
 * row and head, `columns` CP_ATTENTION_ROWS * head_dim floats a head. Returns -1, or the row with a
 * score that is not finite. */
int32_t cp_attention(const cp_path *path, const cp_group *g, const cp_sequence *s, int32_t layer,
                     int32_t first_row, int32_t end_row, int32_t first_head, int32_t end_head,
                     const float *q, float *out, float *tile, float *state, float *columns);

#endif
