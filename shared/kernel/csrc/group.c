/* A layer group over a batch, in the order of the paper. Every function here runs on all threads of
 * a team at once: each does its share of rows, heads or outputs, and a barrier stands wherever one
 * needs what another made. No share depends on the values, no value on the shares. */
#include <math.h>

#include "internal.h"

typedef struct {
    const cp_path *path;
    const cp_group *g;
    const cp_sequence *sequences;
    int32_t num_sequences;
    int32_t num_rows;
    int32_t layer;       /* that runs, as thread 0 sees it */
    int32_t hidden_bad;  /* what is wrong was found in the hidden states that `layer` - 1 left */
    float *hidden;
    float *norm, *q, *k, *v, *attended, *gate, *up, *projected; /* (R, ...) */
    float *tiles;  /* (threads, 2 or 4, 16, head_dim) */
    size_t tile_floats; /* of a thread */
    float *states; /* (threads, 2, 16, H) */
    float *columns; /* (threads, H, head_dim, 16) */
    cp_acts norm2, norm1, heads, inner; /* one buffer: norm2 and norm1 are never alive together */
} forward_job;

static int32_t all_int4(const cp_group *g)
{
    int32_t i;
    for (i = 0; i < g->num_layers; i++) {
        const cp_layer *l = &g->layers[i];
        if (l->q.kind != CP_KIND_INT4 || l->k.kind != CP_KIND_INT4 || l->v.kind != CP_KIND_INT4 ||
            l->o.kind != CP_KIND_INT4 || l->gate.kind != CP_KIND_INT4 ||
            l->up.kind != CP_KIND_INT4 || l->down.kind != CP_KIND_INT4)
            return 0;
    }
    return 1;
}

/* Whether a page may have to be read in plain C. */
static int32_t attends_in_parts(const cp_group *g)
{
    int32_t i, parts = g->score_softcap != 0.0f;
    for (i = 0; i < g->num_layers; i++)
        parts |= g->layers[i].window != 0;
    return parts;
}

static uint64_t weight_bytes(const cp_group *g)
{
    uint64_t sum = 0;
    int32_t i;
    for (i = 0; i < g->num_layers; i++) {
        const cp_layer *l = &g->layers[i];
        sum += l->q.num_bytes + l->k.num_bytes + l->v.num_bytes + l->o.num_bytes +
               l->gate.num_bytes + l->up.num_bytes + l->down.num_bytes;
    }
    return sum;
}

static forward_job take_forward(cp_arena *arena, const cp_engine *engine, const cp_group *g,
                                int32_t rows)
{
    forward_job s = {0};
    uint64_t n = (uint64_t)rows, f = sizeof(float), threads = (uint64_t)cp_engine_threads(engine);
    uint64_t d = (uint64_t)g->hidden_size, inter = (uint64_t)g->intermediate_size;
    uint64_t q_dim = (uint64_t)g->num_heads * (uint64_t)g->head_dim;
    uint64_t kv_dim = (uint64_t)g->num_kv_heads * (uint64_t)g->head_dim;
    int32_t int4 = all_int4(g), passing = cp_passes_by(engine, weight_bytes(g));
    s.path = cp_engine_path(engine);
    s.g = g;
    s.num_rows = rows;
    s.norm = cp_take(arena, n * d, f);
    s.q = cp_take(arena, n * q_dim, f);
    s.k = cp_take(arena, n * kv_dim, f);
    s.v = cp_take(arena, n * kv_dim, f);
    s.attended = cp_take(arena, n * q_dim, f);
    s.gate = cp_take(arena, n * inter, f);
    s.up = cp_take(arena, n * inter, f);
    s.projected = cp_take(arena, n * d, f);
    s.tile_floats = (size_t)(attends_in_parts(g) ? 4 : 2) * CP_PAGE * (size_t)g->head_dim;
    s.tiles = cp_take(arena, threads * s.tile_floats, f);
    s.states = cp_take(arena, threads * 2 * CP_ATTENTION_ROWS * (uint64_t)g->num_heads, f);
    if (s.path->attend_rows)
        s.columns = cp_take(arena, threads * CP_ATTENTION_ROWS * q_dim, f);
    s.norm2 = cp_take_acts(arena, s.path, rows, g->hidden_size, 2, int4, passing);
    s.norm1 = s.norm2;
    s.norm1.terms = 1;
    s.heads = cp_take_acts(arena, s.path, rows, (int32_t)q_dim, 1, int4, passing);
    s.inner = cp_take_acts(arena, s.path, rows, g->intermediate_size, 2, int4, passing);
    return s;
}

uint64_t cp_forward_scratch(const cp_engine *engine, const cp_group *group, int32_t num_rows)
{
    cp_arena arena = {NULL, 0};
    take_forward(&arena, engine, group, num_rows);
    return arena.used;
}

static void norm_rows(cp_team *team, int32_t me, const forward_job *s, const float *weight,
                      const cp_acts *acts)
{
    int32_t r, end;
    for (cp_share(team, me, s->num_rows, 1, &r, &end); r < end; r++) {
        size_t at = (size_t)r * (size_t)s->g->hidden_size;
        if (!cp_norm_quantized(s->path, s->hidden + at, weight, s->g->norm_eps, s->norm + at, acts,
                               r))
            cp_blame(team, r);
    }
}

/* q, k and v: the blocks of the three are shared as if they were one matrix. */
static void project_qkv(cp_team *team, int32_t me, const forward_job *s, const cp_layer *l)
{
    const cp_matrix *matrices[3] = {&l->q, &l->k, &l->v};
    float *outs[3] = {s->q, s->k, s->v};
    int32_t first, end, before = 0, i;
    cp_share(team, me, cp_num_blocks(&l->q) + cp_num_blocks(&l->k) + cp_num_blocks(&l->v), 1,
             &first, &end);
    for (i = 0; i < 3; i++) {
        int32_t blocks = cp_num_blocks(matrices[i]);
        int32_t from = first > before ? first - before : 0;
        int32_t to = end - before < blocks ? end - before : blocks;
        if (from < to)
            cp_multiply(s->path, matrices[i], &s->norm2, outs[i], from, to);
        before += blocks;
    }
}

/* Normalise x (n). Returns 0 if the mean square is not finite. */
static int norm_in_place(const cp_path *path, float *x, const float *weight, float eps, int32_t n)
{
    float ms = path->dot8(x, x, n) / (float)n;
    path->scale_by(x, 1.0f / sqrtf(ms + eps), weight, n, x);
    return path->all_finite(&ms, 1);
}

static int norm_heads(const forward_job *s, float *x, const float *weight, int32_t heads)
{
    int32_t fine = 1, h;
    for (h = 0; h < heads; h++, x += s->g->head_dim)
        fine &= norm_in_place(s->path, x, weight, s->g->norm_eps, s->g->head_dim);
    return fine;
}

/* The sequence that batch row r belongs to, and its place there. */
static const cp_sequence *sequence_of(const forward_job *s, int32_t r, int32_t *row)
{
    const cp_sequence *sequence = s->sequences;
    for (; r >= sequence->num_rows; sequence++)
        r -= sequence->num_rows;
    *row = r;
    return sequence;
}

/* What lies between the projections and attention: biases, norms of heads, rope; then the new keys
 * and values are stored. */
static void rotate_and_store(cp_team *team, int32_t me, const forward_job *s, int32_t layer)
{
    const cp_group *g = s->g;
    const cp_layer *l = &g->layers[layer];
    int32_t q_dim = g->num_heads * g->head_dim, kv_dim = g->num_kv_heads * g->head_dim;
    int32_t r, end, row;
    for (cp_share(team, me, s->num_rows, 1, &r, &end); r < end; r++) {
        const cp_sequence *sequence = sequence_of(s, r, &row);
        int64_t position = sequence->start_position + row;
        size_t at = (size_t)position * (size_t)(g->head_dim / 2);
        float *q = s->q + (size_t)r * (size_t)q_dim;
        float *k = s->k + (size_t)r * (size_t)kv_dim, *v = s->v + (size_t)r * (size_t)kv_dim;
        int fine;
        if (l->q_bias) {
            s->path->add_to(q, l->q_bias, q_dim);
            s->path->add_to(k, l->k_bias, kv_dim);
            s->path->add_to(v, l->v_bias, kv_dim);
        }
        fine = s->path->all_finite(q, q_dim) && s->path->all_finite(k, kv_dim) &&
               s->path->all_finite(v, kv_dim);
        if (l->q_norm)
            fine &= norm_heads(s, q, l->q_norm, g->num_heads) &
                    norm_heads(s, k, l->k_norm, g->num_kv_heads);
        if (l->rope_cos) {
            s->path->rope(q, l->rope_cos + at, l->rope_sin + at, g->num_heads, g->head_dim,
                          g->half_pairing);
            s->path->rope(k, l->rope_cos + at, l->rope_sin + at, g->num_kv_heads, g->head_dim,
                          g->half_pairing);
        }
        if (!fine || !s->path->all_finite(k, kv_dim))
            cp_blame(team, r);
        else
            cp_store_kv(s->path, g, sequence, layer, position, k, v);
    }
}

/* Units of (sequence, run of rows, heads that share keys) are handed out one by one, the last ones
 * first: they read the most. With few of them each query head is a unit of its own. */
static void attend(cp_team *team, int32_t me, const forward_job *s, int32_t layer)
{
    const cp_group *g = s->g;
    int32_t repeat = g->num_heads / g->num_kv_heads, total = 0, i, unit;
    int32_t split = s->num_sequences * g->num_kv_heads < 2 * team->size ? repeat : 1;
    int32_t heads = repeat / split, units_per_run = g->num_heads / heads;
    size_t q_dim = (size_t)g->num_heads * (size_t)g->head_dim;
    float *tile = s->tiles + (size_t)me * s->tile_floats;
    float *state = s->states + (size_t)me * 2 * CP_ATTENTION_ROWS * (size_t)g->num_heads;
    float *columns = s->columns ? s->columns + (size_t)me * CP_ATTENTION_ROWS * q_dim : NULL;
    for (i = 0; i < s->num_sequences; i++)
        total += (s->sequences[i].num_rows + CP_ATTENTION_ROWS - 1) / CP_ATTENTION_ROWS;
    total *= units_per_run;
    while ((unit = cp_next_unit(team)) < total) {
        int32_t left = (total - 1 - unit) / units_per_run, row = 0, first, end, bad;
        int32_t head = (total - 1 - unit) % units_per_run * heads;
        const cp_sequence *sequence = s->sequences;
        for (;; sequence++) {
            int32_t runs = (sequence->num_rows + CP_ATTENTION_ROWS - 1) / CP_ATTENTION_ROWS;
            if (left < runs)
                break;
            left -= runs;
            row += sequence->num_rows;
        }
        first = left * CP_ATTENTION_ROWS;
        end = first + CP_ATTENTION_ROWS < sequence->num_rows ? first + CP_ATTENTION_ROWS
                                                             : sequence->num_rows;
        bad = cp_attention(s->path, g, sequence, layer, first, end, head, head + heads,
                           s->q + (size_t)row * q_dim, s->attended + (size_t)row * q_dim, tile,
                           state, columns);
        if (bad >= 0)
            cp_blame(team, row + bad);
    }
}

static void quantize_heads(cp_team *team, int32_t me, const forward_job *s)
{
    int32_t q_dim = s->heads.cols, r, end;
    for (cp_share(team, me, s->num_rows, 1, &r, &end); r < end; r++)
        if (!cp_quantize(s->path, s->attended + (size_t)r * (size_t)q_dim, &s->heads, r, 0,
                         q_dim / CP_GROUP))
            cp_blame(team, r);
}

/* x = x + matrix * acts, each thread its own outputs; or x + norm of that, each thread its own rows:
 * a norm needs all outputs of a row. */
static void add_projected(cp_team *team, int32_t me, const forward_job *s, const cp_matrix *m,
                          const cp_acts *acts, const float *norm)
{
    int32_t first, end, r;
    cp_share(team, me, cp_num_blocks(m), 1, &first, &end);
    cp_multiply(s->path, m, acts, s->projected, first, end);
    if (norm) {
        cp_barrier(team);
        for (cp_share(team, me, s->num_rows, 1, &r, &end); r < end; r++) {
            float *row = s->projected + (size_t)r * (size_t)m->rows;
            if (!norm_in_place(s->path, row, norm, s->g->norm_eps, m->rows))
                cp_blame(team, r);
            s->path->add_to(s->hidden + (size_t)r * (size_t)m->rows, row, m->rows);
        }
        return;
    }
    first *= CP_BLOCK;
    end = end * CP_BLOCK < m->rows ? end * CP_BLOCK : m->rows;
    for (r = 0; r < s->num_rows && first < end; r++) {
        size_t at = (size_t)r * (size_t)m->rows + (size_t)first;
        s->path->add_to(s->hidden + at, s->projected + at, end - first);
    }
}

/* silu or gelu(gate(y)) * up(y), quantised: whole groups of 32 outputs, so that none is shared. */
static void gate_and_up(cp_team *team, int32_t me, const forward_job *s, const cp_layer *l)
{
    int32_t inter = s->g->intermediate_size, first, end, r;
    cp_share(team, me, inter, CP_GROUP, &first, &end);
    if (first == end)
        return;
    cp_multiply(s->path, &l->gate, &s->norm1, s->gate, first / CP_BLOCK, end / CP_BLOCK);
    cp_multiply(s->path, &l->up, &s->norm1, s->up, first / CP_BLOCK, end / CP_BLOCK);
    for (r = 0; r < s->num_rows; r++) {
        float *row = s->gate + (size_t)r * (size_t)inter, *up = s->up + (size_t)r * (size_t)inter;
        int fine = s->path->all_finite(row + first, end - first);
        if (s->g->gelu_tanh)
            cp_gelu_mul_on(s->path, row + first, up + first, end - first);
        else
            s->path->silu_mul(row + first, up + first, end - first);
        if (!fine || !cp_quantize(s->path, row, &s->inner, r, first / CP_GROUP, end / CP_GROUP))
            cp_blame(team, r);
    }
}

static void check_hidden(cp_team *team, int32_t me, forward_job *s)
{
    int32_t d = s->g->hidden_size, r, end;
    for (cp_share(team, me, s->num_rows, 1, &r, &end); r < end; r++)
        if (!s->path->all_finite(s->hidden + (size_t)r * (size_t)d, d)) {
            s->hidden_bad = 1; /* whoever writes it writes this; read when all threads are done */
            cp_blame(team, r);
        }
}

/* x = x + attention(rms_norm(x)); x = x + down(silu(gate(y)) * up(y)), y = rms_norm(x); what is added
 * may be normalised, and silu be gelu. Returns whether a row was found that is not finite. */
static int run_layer(cp_team *team, int32_t me, forward_job *s, int32_t layer)
{
    const cp_layer *l = &s->g->layers[layer];
    norm_rows(team, me, s, l->input_norm, &s->norm2);
    if (cp_barrier(team))
        return 1;
    project_qkv(team, me, s, l);
    cp_barrier(team);
    rotate_and_store(team, me, s, layer);
    if (cp_barrier(team))
        return 1;
    attend(team, me, s, layer);
    if (cp_barrier(team))
        return 1;
    quantize_heads(team, me, s);
    if (cp_barrier(team))
        return 1;
    add_projected(team, me, s, &l->o, &s->heads, l->attention_out_norm);
    if (cp_barrier(team))
        return 1;
    norm_rows(team, me, s, l->post_norm, &s->norm1);
    if (cp_barrier(team))
        return 1;
    gate_and_up(team, me, s, l);
    if (cp_barrier(team))
        return 1;
    add_projected(team, me, s, &l->down, &s->inner, l->mlp_out_norm);
    if (cp_barrier(team))
        return 1;
    check_hidden(team, me, s);
    return 0; /* the barrier behind the next norm sees what was found */
}

static void run_layers(cp_team *team, int32_t me, void *context)
{
    forward_job *s = context;
    int32_t layer;
    for (layer = 0; layer < s->g->num_layers; layer++) {
        if (me == 0)
            s->layer = layer;
        if (run_layer(team, me, s, layer))
            return;
    }
    if (me == 0)
        s->layer = layer;
}

int cp_forward(cp_engine *engine, const cp_group *group, const cp_sequence *sequences,
               int32_t num_sequences, float *hidden, int32_t num_rows, void *scratch,
               uint64_t scratch_bytes, cp_fault *fault)
{
    cp_arena arena = {scratch, 0};
    forward_job job;
    int64_t total = 0;
    int32_t i;
    if (!cp_group_valid(group, fault))
        return CP_BAD_SIZE;
    for (i = 0; i < num_sequences; i++)
        total += sequences[i].num_rows;
    if (num_rows <= 0 || total != num_rows)
        return CP_BAD_SIZE;
    fault->row = cp_misplaced_sequence(group, sequences, num_sequences);
    if (fault->row >= 0)
        return CP_BAD_POSITION;
    job = take_forward(&arena, engine, group, num_rows);
    if (scratch == NULL || arena.used > scratch_bytes)
        return CP_BAD_SCRATCH;
    job.hidden = hidden;
    job.sequences = sequences;
    job.num_sequences = num_sequences;
    fault->row = cp_run(engine, run_layers, &job);
    if (fault->row >= 0)
        fault->layer = job.layer - job.hidden_bad;
    return fault->row < 0 ? CP_OK : CP_NOT_FINITE;
}
