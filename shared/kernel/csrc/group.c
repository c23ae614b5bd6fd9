/* A layer group over a batch, in the order of the paper. */
#include "fpmode.h"
#include "internal.h"

typedef struct {
    float *norm, *q, *k, *v, *attended, *gate, *up, *projected; /* (R, ...) */
    float *state;                                               /* (2, R, H) */
    float *tile;                                                /* (2, 16, head_dim) */
    cp_acts acts;
} forward_scratch;

static int32_t max3(int32_t a, int32_t b, int32_t c)
{
    int32_t m = a > b ? a : b;
    return m > c ? m : c;
}

static forward_scratch take_forward(cp_arena *arena, const cp_group *g, int32_t rows)
{
    forward_scratch s;
    uint64_t n = (uint64_t)rows, f = sizeof(float);
    uint64_t d = (uint64_t)g->hidden_size, inter = (uint64_t)g->intermediate_size;
    uint64_t q_dim = (uint64_t)g->num_heads * (uint64_t)g->head_dim;
    uint64_t kv_dim = (uint64_t)g->num_kv_heads * (uint64_t)g->head_dim;
    s.norm = cp_take(arena, n * d, f);
    s.q = cp_take(arena, n * q_dim, f);
    s.k = cp_take(arena, n * kv_dim, f);
    s.v = cp_take(arena, n * kv_dim, f);
    s.attended = cp_take(arena, n * q_dim, f);
    s.gate = cp_take(arena, n * inter, f);
    s.up = cp_take(arena, n * inter, f);
    s.projected = cp_take(arena, n * d, f);
    s.state = cp_take(arena, 2 * n * (uint64_t)g->num_heads, f);
    s.tile = cp_take(arena, 2 * CP_PAGE * (uint64_t)g->head_dim, f);
    s.acts =
        cp_take_acts(arena, rows, max3(g->hidden_size, g->intermediate_size, (int32_t)q_dim), 2);
    return s;
}

uint64_t cp_forward_scratch(const cp_group *group, int32_t num_rows)
{
    cp_arena arena = {NULL, 0};
    take_forward(&arena, group, num_rows);
    return arena.used;
}

static void add_to(float *x, const float *y, size_t n)
{
    size_t i;
    for (i = 0; i < n; i++)
        x[i] += y[i];
}

/* x = x + attention(rms_norm(x)). -1, or the row that is not finite. */
static int32_t attention_part(const cp_group *g, int32_t layer, const cp_sequence *sequences,
                              int32_t num_sequences, float *hidden, int32_t rows,
                              forward_scratch *s)
{
    const cp_layer *l = &g->layers[layer];
    int32_t q_dim = g->num_heads * g->head_dim, kv_dim = g->num_kv_heads * g->head_dim;
    int32_t half = g->head_dim / 2, bad, i, t, row = 0;
    bad = cp_norm_quantized(hidden, l->input_norm, g->norm_eps, rows, g->hidden_size, 2, s->norm,
                            &s->acts);
    if (bad >= 0)
        return bad;
    cp_multiply_all(&l->q, &s->acts, rows, s->q);
    cp_multiply_all(&l->k, &s->acts, rows, s->k);
    cp_multiply_all(&l->v, &s->acts, rows, s->v);
    if ((bad = cp_unfinished_row(s->q, rows, q_dim)) >= 0 ||
        (bad = cp_unfinished_row(s->k, rows, kv_dim)) >= 0 ||
        (bad = cp_unfinished_row(s->v, rows, kv_dim)) >= 0)
        return bad;
    for (i = 0; i < num_sequences; i++) {
        const cp_sequence *seq = &sequences[i];
        float *q = s->q + (size_t)row * (size_t)q_dim;
        float *k = s->k + (size_t)row * (size_t)kv_dim;
        float *v = s->v + (size_t)row * (size_t)kv_dim;
        for (t = 0; t < seq->num_rows; t++) {
            size_t at = (size_t)(seq->start_position + t) * (size_t)half;
            cp_rope(q + (size_t)t * (size_t)q_dim, g->rope_cos + at, g->rope_sin + at,
                    g->num_heads, g->head_dim, g->half_pairing);
            cp_rope(k + (size_t)t * (size_t)kv_dim, g->rope_cos + at, g->rope_sin + at,
                    g->num_kv_heads, g->head_dim, g->half_pairing);
        }
        if ((bad = cp_unfinished_row(k, seq->num_rows, kv_dim)) >= 0)
            return row + bad;
        cp_store_kv(g, seq, layer, k, v);
        bad = cp_attention(g, seq, layer, q, s->attended + (size_t)row * (size_t)q_dim, s->state,
                           s->tile);
        if (bad >= 0)
            return row + bad;
        row += seq->num_rows;
    }
    if ((bad = cp_quantize(s->attended, rows, q_dim, 1, &s->acts)) >= 0)
        return bad;
    cp_multiply_all(&l->o, &s->acts, rows, s->projected);
    add_to(hidden, s->projected, (size_t)rows * (size_t)g->hidden_size);
    return -1;
}

/* x = x + down(silu(gate(y)) * up(y)), y = rms_norm(x). -1, or the row that is not finite. */
static int32_t mlp_part(const cp_group *g, int32_t layer, float *hidden, int32_t rows,
                        forward_scratch *s)
{
    const cp_layer *l = &g->layers[layer];
    int32_t bad, r;
    bad = cp_norm_quantized(hidden, l->post_norm, g->norm_eps, rows, g->hidden_size, 1, s->norm,
                            &s->acts);
    if (bad >= 0)
        return bad;
    cp_multiply_all(&l->gate, &s->acts, rows, s->gate);
    cp_multiply_all(&l->up, &s->acts, rows, s->up);
    if ((bad = cp_unfinished_row(s->gate, rows, g->intermediate_size)) >= 0)
        return bad;
    for (r = 0; r < rows; r++) {
        size_t at = (size_t)r * (size_t)g->intermediate_size;
        cp_silu_mul(s->gate + at, s->up + at, g->intermediate_size);
    }
    if ((bad = cp_quantize(s->gate, rows, g->intermediate_size, 2, &s->acts)) >= 0)
        return bad;
    cp_multiply_all(&l->down, &s->acts, rows, s->projected);
    add_to(hidden, s->projected, (size_t)rows * (size_t)g->hidden_size);
    return cp_unfinished_row(hidden, rows, g->hidden_size);
}

/* -1, or the sequence whose positions lie outside the rope tables or its pages. */
static int32_t misplaced_sequence(const cp_group *g, const cp_sequence *sequences, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++) {
        const cp_sequence *s = &sequences[i];
        if (s->num_rows <= 0 || s->start_position < 0 ||
            s->start_position > (int64_t)g->num_positions - s->num_rows ||
            s->start_position + s->num_rows > (int64_t)s->num_pages * CP_PAGE)
            return i;
    }
    return -1;
}

static int run_layers(const cp_group *g, const cp_sequence *sequences, int32_t num_sequences,
                      float *hidden, int32_t num_rows, forward_scratch *s, cp_fault *fault)
{
    int32_t layer;
    for (layer = 0; layer < g->num_layers; layer++) {
        fault->layer = layer;
        fault->row = attention_part(g, layer, sequences, num_sequences, hidden, num_rows, s);
        if (fault->row >= 0)
            return CP_NOT_FINITE;
        fault->row = mlp_part(g, layer, hidden, num_rows, s);
        if (fault->row >= 0)
            return CP_NOT_FINITE;
    }
    return CP_OK;
}

int cp_forward(const cp_group *group, const cp_sequence *sequences, int32_t num_sequences,
               float *hidden, int32_t num_rows, void *scratch, uint64_t scratch_bytes,
               cp_fault *fault)
{
    cp_arena arena = {scratch, 0};
    forward_scratch s;
    cp_fpmode mode;
    int64_t total = 0;
    int32_t i;
    int result;
    if (!cp_group_valid(group, fault))
        return CP_BAD_SIZE;
    for (i = 0; i < num_sequences; i++)
        total += sequences[i].num_rows;
    if (num_rows <= 0 || total != num_rows)
        return CP_BAD_SIZE;
    fault->row = misplaced_sequence(group, sequences, num_sequences);
    if (fault->row >= 0)
        return CP_BAD_POSITION;
    s = take_forward(&arena, group, num_rows);
    if (scratch == NULL || arena.used > scratch_bytes)
        return CP_BAD_SCRATCH;
    mode = cp_fpmode_enter();
    result = run_layers(group, sequences, num_sequences, hidden, num_rows, &s, fault);
    cp_fpmode_leave(mode);
    return result;
}
