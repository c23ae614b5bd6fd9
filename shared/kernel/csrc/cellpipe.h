/* The kernel's interface: what a caller hands in, and what it gets back.
 *
 * docs/arithmetic.md defines every result. The kernel keeps no state between calls but the threads
 * of an engine and knows no Python; all memory but an engine's is the caller's.
 *
 * R rows of the batch, D hidden_size, H heads, K kv heads, V vocab.
 */
#ifndef CELLPIPE_H
#define CELLPIPE_H

#include <stddef.h>
#include <stdint.h>

/* Between the two marks: plain declarations that cffi reads too. */
/* cffi: begin */
enum {
    CP_KIND_F32 = 0,  /* row-major binary32; for look-up only */
    CP_KIND_INT4 = 1,
    CP_KIND_INT8 = 2
};

enum {
    CP_OK = 0,
    CP_BAD_SIZE = 1,      /* sizes that disagree; `layer` says where, -1 outside the layers */
    CP_NOT_FINITE = 2,    /* a value that is not finite, in `layer`, in batch row `row` */
    CP_BAD_POSITION = 3,  /* a position outside the rope tables or the pages; `row`: sequence */
    CP_BAD_TOKEN = 4,     /* a token id outside the vocabulary; `row` says which */
    CP_BAD_SCRATCH = 5    /* scratch memory too small */
};

enum {
    CP_PORTABLE = 0,
    CP_AVX2 = 1,
    CP_AVX512VNNI = 2,
    CP_NEON_DOT = 3,
    CP_AMX_BF16 = 4,
    CP_NUM_PATHS = 5
};

/* How to compute: an instruction set and a number of threads. */
typedef struct cp_engine cp_engine;

/* Whether this build and this CPU have a path. */
int cp_has_path(int32_t path);

/* NULL if the path is missing or memory is. Threads start with the first call that uses the engine,
 * and again in a forked child. One call at a time uses them; others meanwhile run on one thread. */
cp_engine *cp_engine_new(int32_t path, int32_t num_threads);
void cp_engine_free(cp_engine *engine);

typedef struct {
    int32_t layer;
    int32_t row;
} cp_fault;

typedef struct {
    const uint8_t *data;
    uint64_t num_bytes;
    int32_t kind;
    int32_t rows;
    int32_t cols;
    int32_t chunk_rows;
} cp_matrix;

typedef struct {
    const float *input_norm;  /* (D) */
    const float *post_norm;   /* (D) */
    cp_matrix q, k, v, o, gate, up, down;
    const float *rope_cos, *rope_sin; /* (num_positions, head_dim/2); both NULL: no rope */
    int32_t window;           /* positions that a row sees, its own among them; 0: all before it */
    /* Of each line a layer has all or, NULL, none. */
    const float *q_bias, *k_bias, *v_bias; /* (H * head_dim), (K * head_dim), (K * head_dim) */
    const float *q_norm, *k_norm;          /* (head_dim): of each head, before rope */
    const float *attention_out_norm, *mlp_out_norm; /* (D): of what is added to the hidden states */
} cp_layer;

typedef struct {
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t half_pairing;   /* 0: (2i, 2i+1) rotate together; 1: (i, i + head_dim/2) */
    int32_t num_positions;  /* rows of the rope tables */
    int32_t num_layers;
    float norm_eps;
    float score_scale;      /* 1/sqrt(head_dim), or what stands for it */
    float score_softcap;    /* 0: none */
    int32_t gelu_tanh;      /* what the gate goes through, else silu */
    const cp_layer *layers;
} cp_group;

/* A run of consecutive positions of one sequence. Page p holds positions 16p..16p+15 of all layers
 * of the group: uint16 (fp16 bits, host order) [num_layers][num_kv_heads][2: K, V][16][head_dim]. */
typedef struct {
    int64_t start_position;
    int32_t num_rows;
    int32_t num_pages;
    uint16_t *const *pages;
} cp_sequence;

/* Bytes of scratch memory that cp_forward needs for a batch of num_rows rows. */
uint64_t cp_forward_scratch(const cp_engine *engine, const cp_group *group, int32_t num_rows);

/* Run the layers of a group over hidden (R, D), in place, the rows of the sequences one after the
 * other. Writes their keys and values into the pages. Returns CP_OK or what is wrong; then hidden
 * and the new KV rows are of no use. */
int cp_forward(cp_engine *engine, const cp_group *group, const cp_sequence *sequences,
               int32_t num_sequences, float *hidden, int32_t num_rows, void *scratch,
               uint64_t scratch_bytes, cp_fault *fault);

/* Rows of a matrix as binary32, times `scale`: out (n, cols). */
int cp_embed(const cp_matrix *matrix, const int32_t *token_ids, int32_t n, float scale, float *out,
             cp_fault *fault);

uint64_t cp_logits_scratch(const cp_engine *engine, const cp_matrix *head, int32_t num_rows);

/* out (n, V) = head x rms_norm(rows (n, D)), capped softly unless softcap is 0; largest (n): the
 * lowest id of each row's largest. */
int cp_logits(cp_engine *engine, const cp_matrix *head, const float *norm, float norm_eps,
              float softcap, const float *rows, int32_t n, float *out, int32_t *largest, void *scratch,
              uint64_t scratch_bytes, cp_fault *fault);

/* Single operations, for tests that hold them against the reference, and for measuring. x is
 * quantised to `terms` (1 or 2) bytes. */
uint64_t cp_matmul_scratch(const cp_engine *engine, const cp_matrix *matrix, int32_t num_rows);
int cp_matmul(cp_engine *engine, const cp_matrix *matrix, const float *x, int32_t num_rows,
              int32_t terms, float *out, void *scratch, uint64_t scratch_bytes, cp_fault *fault);
void cp_exp(const cp_engine *engine, const float *x, float *out, int32_t n);
/* gate (n) = gelu_tanh(gate) * up; n is a multiple of 32. */
void cp_gelu_mul(const cp_engine *engine, float *gate, const float *up, int32_t n);
/* x (n) = cap * tanh(x / cap) */
void cp_softcap(float *x, float cap, int32_t n);
void cp_to_half(const cp_engine *engine, const float *x, uint16_t *out, int32_t n);
void cp_from_half(const cp_engine *engine, const uint16_t *x, float *out, int32_t n);

/* What the path could do at most: multiply-adds of int8 in registers, on all threads at once, for
 * `rounds` rounds; returns how many there were. */
uint64_t cp_peak(cp_engine *engine, uint64_t rounds);
/* Reads n bytes (a multiple of 4096) once, each thread its share; returns a number made from them. */
uint64_t cp_read(cp_engine *engine, const uint8_t *bytes, uint64_t n);
/* cffi: end */

#endif
