/* What lies before and after the layers: the embedding, the logits; and single operations. */
#include "fpmode.h"
#include "internal.h"
#include "numbers.h"

typedef struct {
    const cp_path *path;
    const cp_matrix *matrix;
    const float *x;
    const float *norm; /* NULL: x is not normalised */
    float norm_eps;
    float softcap; /* 0: none */
    float *normed;
    cp_acts acts;
    float *out;
    int32_t *largest; /* (threads, R): of each one's share of the outputs, -1 for none; or NULL */
} ends_job;

/* The first of the largest of x (n), all finite. */
static int32_t largest_of(const float *x, int32_t n)
{
    float lanes[16], most = x[0];
    int32_t i, j;
    for (j = 0; j < 16; j++)
        lanes[j] = x[0];
    for (i = 0; i + 16 <= n; i += 16)
        for (j = 0; j < 16; j++)
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (j = 0; j < 16; j++)
        most = lanes[j] > most ? lanes[j] : most;
    for (; i < n; i++)
        most = x[i] > most ? x[i] : most;
    for (i = 0; x[i] != most; i++)
        ;
    return i;
}

/* out = matrix x (x or rms_norm(x)). */
static void multiply_rows(cp_team *team, int32_t me, void *context)
{
    const ends_job *job = context;
    const cp_path *path = job->path;
    const cp_matrix *m = job->matrix;
    int32_t cols = m->cols, r, first, end, first_col, end_col;
    cp_share(team, me, job->acts.rows, 1, &first, &end);
    for (r = first; r < end; r++) {
        const float *x = job->x + (size_t)r * (size_t)cols;
        float *normed = job->normed + (size_t)r * (size_t)cols;
        int fine = job->norm ? cp_norm_quantized(path, x, job->norm, job->norm_eps, normed,
                                                 &job->acts, r)
                             : cp_quantize(path, x, &job->acts, r, 0, cols / CP_GROUP);
        if (!fine) {
            cp_blame(team, r);
            break;
        }
    }
    if (cp_barrier(team))
        return;
    cp_share(team, me, cp_num_blocks(m), 1, &first, &end);
    cp_multiply(path, m, &job->acts, job->out, first, end);
    first_col = first * CP_BLOCK;
    end_col = end * CP_BLOCK < m->rows ? end * CP_BLOCK : m->rows;
    for (r = 0; r < job->acts.rows; r++) {
        float *out = job->out + (size_t)r * (size_t)m->rows + first_col;
        int32_t largest = -1;
        if (first_col < end_col && !path->all_finite(out, end_col - first_col))
            cp_blame(team, r);
        else if (first_col < end_col && job->largest) {
            if (job->softcap != 0.0f)
                cp_softcap(out, job->softcap, end_col - first_col);
            largest = first_col + largest_of(out, end_col - first_col);
        }
        if (job->largest)
            job->largest[(size_t)me * (size_t)job->acts.rows + (size_t)r] = largest;
    }
}

static ends_job take_job(cp_arena *arena, const cp_engine *engine, const cp_matrix *matrix,
                         int32_t rows, int32_t terms, int normed)
{
    ends_job job = {0};
    job.path = cp_engine_path(engine);
    job.matrix = matrix;
    if (normed) {
        uint64_t n = (uint64_t)rows, threads = (uint64_t)cp_engine_threads(engine);
        job.normed = cp_take(arena, n * (uint64_t)matrix->cols, sizeof(float));
        job.largest = cp_take(arena, threads * n, sizeof(int32_t));
    }
    job.acts = cp_take_acts(arena, job.path, rows, matrix->cols, terms,
                            matrix->kind == CP_KIND_INT4,
                            cp_passes_by(engine, matrix->num_bytes));
    return job;
}

static int run_job(cp_engine *engine, ends_job *job, const float *x, const float *norm,
                   float norm_eps, float *out, cp_fault *fault)
{
    job->x = x;
    job->norm = norm;
    job->norm_eps = norm_eps;
    job->out = out;
    fault->row = cp_run(engine, multiply_rows, job);
    return fault->row < 0 ? CP_OK : CP_NOT_FINITE;
}

static int multipliable(const cp_matrix *m, int32_t num_rows)
{
    return num_rows > 0 && m->kind != CP_KIND_F32 && cp_matrix_valid(m, m->rows, m->cols);
}

uint64_t cp_matmul_scratch(const cp_engine *engine, const cp_matrix *matrix, int32_t num_rows)
{
    cp_arena arena = {NULL, 0};
    take_job(&arena, engine, matrix, num_rows, 2, 0);
    return arena.used;
}

int cp_matmul(cp_engine *engine, const cp_matrix *matrix, const float *x, int32_t num_rows,
              int32_t terms, float *out, void *scratch, uint64_t scratch_bytes, cp_fault *fault)
{
    cp_arena arena = {scratch, 0};
    ends_job job;
    fault->layer = fault->row = -1;
    if (terms < 1 || terms > 2 || !multipliable(matrix, num_rows))
        return CP_BAD_SIZE;
    job = take_job(&arena, engine, matrix, num_rows, terms, 0);
    if (scratch == NULL || arena.used > scratch_bytes)
        return CP_BAD_SCRATCH;
    return run_job(engine, &job, x, NULL, 0.0f, out, fault);
}

uint64_t cp_logits_scratch(const cp_engine *engine, const cp_matrix *head, int32_t num_rows)
{
    cp_arena arena = {NULL, 0};
    take_job(&arena, engine, head, num_rows, 2, 1);
    return arena.used;
}

int cp_logits(cp_engine *engine, const cp_matrix *head, const float *norm, float norm_eps,
              float softcap, const float *rows, int32_t n, float *out, int32_t *largest,
              void *scratch, uint64_t scratch_bytes, cp_fault *fault)
{
    cp_arena arena = {scratch, 0};
    ends_job job;
    int32_t threads = cp_engine_threads(engine), thread, r;
    int code;
    fault->layer = fault->row = -1;
    if (!multipliable(head, n))
        return CP_BAD_SIZE;
    job = take_job(&arena, engine, head, n, 2, 1);
    job.softcap = softcap;
    if (scratch == NULL || arena.used > scratch_bytes)
        return CP_BAD_SCRATCH;
    for (r = 0; r < threads * n; r++)
        job.largest[r] = -1; /* fewer threads may come than were asked for */
    code = run_job(engine, &job, rows, norm, norm_eps, out, fault);
    for (r = 0; r < n && code == CP_OK; r++) {
        const float *row = out + (size_t)r * (size_t)head->rows;
        largest[r] = job.largest[r]; /* a later share has higher ids */
        for (thread = 1; thread < threads; thread++) {
            int32_t id = job.largest[(size_t)thread * (size_t)n + (size_t)r];
            if (id >= 0 && (largest[r] < 0 || row[id] > row[largest[r]]))
                largest[r] = id;
        }
    }
    return code;
}

void cp_exp(const cp_engine *engine, const float *x, float *out, int32_t n)
{
    cp_engine_path(engine)->exp(x, out, n);
}

/* x / (1 + e^-v), v = x * (c + d * x^2): half of 1 + tanh(v / 2) is 1 / (1 + e^-v). */
void cp_gelu_mul_on(const cp_path *path, float *gate, const float *up, int32_t n)
{
    float e[CP_GROUP];
    int32_t i, j;
    for (i = 0; i < n; i += CP_GROUP, gate += CP_GROUP, up += CP_GROUP) {
        for (j = 0; j < CP_GROUP; j++)
            e[j] = -(gate[j] * (1.5957691216f + 0.0713548162726f * (gate[j] * gate[j])));
        path->exp(e, e, CP_GROUP);
        for (j = 0; j < CP_GROUP; j++)
            gate[j] = (gate[j] / (1.0f + e[j])) * up[j];
    }
}

void cp_gelu_mul(const cp_engine *engine, float *gate, const float *up, int32_t n)
{
    cp_gelu_mul_on(cp_engine_path(engine), gate, up, n);
}

void cp_softcap(float *x, float cap, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        x[i] = cp_softcap1(x[i], cap);
}

void cp_to_half(const cp_engine *engine, const float *x, uint16_t *out, int32_t n)
{
    cp_engine_path(engine)->to_half(x, out, n);
}

void cp_from_half(const cp_engine *engine, const uint16_t *x, float *out, int32_t n)
{
    cp_engine_path(engine)->from_half(x, out, n);
}

static uint32_t word_at(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void embed_row(const cp_matrix *m, int32_t row, float *out)
{
    int32_t in_chunk = row % m->chunk_rows, r = row % CP_BLOCK, groups = m->cols / CP_GROUP, g, j;
    const uint8_t *block = m->data +
                           (uint64_t)(row / m->chunk_rows) * cp_chunk_bytes(m, m->chunk_rows) +
                           (uint64_t)(in_chunk / CP_BLOCK) * cp_block_bytes(m->kind, m->cols);
    const uint8_t *scales = block, *slabs = block + cp_int8_scale_bytes(m->cols);
    for (g = 0; g < groups; g++, out += CP_GROUP) {
        if (m->kind == CP_KIND_INT8) {
            const uint8_t *at = scales + (g * CP_BLOCK + r) * 2;
            float scale = cp_from_half1((uint32_t)at[0] | (uint32_t)at[1] << 8);
            for (j = 0; j < CP_GROUP; j++)
                out[j] = (float)(int8_t)slabs[g * CP_INT8_GROUP + j / 4 * 64 + 4 * r + j % 4] *
                         scale;
        } else {
            const uint8_t *at = block + g * CP_INT4_GROUP;
            float scale = cp_from_half1((uint32_t)at[2 * r] | (uint32_t)at[2 * r + 1] << 8);
            float min = cp_from_half1((uint32_t)at[32 + 2 * r] | (uint32_t)at[33 + 2 * r] << 8);
            for (j = 0; j < 16; j++) {
                uint8_t pair = at[64 + j / 4 * 64 + 4 * r + j % 4];
                out[j] = (float)(pair & 15) * scale + min;
                out[16 + j] = (float)(pair >> 4) * scale + min;
            }
        }
    }
}

int cp_embed(const cp_matrix *matrix, const int32_t *token_ids, int32_t n, float scale, float *out,
             cp_fault *fault)
{
    int32_t i, j;
    cp_fpmode mode;
    fault->layer = fault->row = -1;
    if (!cp_matrix_valid(matrix, matrix->rows, matrix->cols))
        return CP_BAD_SIZE;
    for (i = 0; i < n; i++)
        if (token_ids[i] < 0 || token_ids[i] >= matrix->rows) {
            fault->row = i;
            return CP_BAD_TOKEN;
        }
    mode = cp_fpmode_enter();
    for (i = 0; i < n; i++, out += matrix->cols) {
        const uint8_t *row =
            matrix->data + (uint64_t)token_ids[i] * (uint64_t)matrix->cols * 4;
        if (matrix->kind == CP_KIND_F32)
            for (j = 0; j < matrix->cols; j++)
                out[j] = cp_float(word_at(row + 4 * (size_t)j));
        else
            embed_row(matrix, token_ids[i], out);
        for (j = 0; scale != 1.0f && j < matrix->cols; j++)
            out[j] *= scale;
    }
    cp_fpmode_leave(mode);
    return CP_OK;
}
