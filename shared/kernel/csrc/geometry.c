/* Sizes: of blocks, chunks, scratch memory; and whether what a caller hands in fits together. */
#include "internal.h"

static uint64_t align_up(uint64_t n, uint64_t alignment)
{
    return (n + alignment - 1) / alignment * alignment;
}

uint64_t cp_int8_scale_bytes(int32_t cols)
{
    return align_up((uint64_t)(cols / CP_GROUP) * CP_BLOCK * 2, 64);
}

uint64_t cp_block_bytes(int32_t kind, int32_t cols)
{
    uint64_t groups = (uint64_t)(cols / CP_GROUP);
    if (kind == CP_KIND_INT4)
        return groups * CP_INT4_GROUP;
    if (kind == CP_KIND_INT8)
        return cp_int8_scale_bytes(cols) + groups * CP_INT8_GROUP;
    return 0;
}

uint64_t cp_chunk_bytes(const cp_matrix *m, int32_t chunk_rows)
{
    uint64_t blocks = ((uint64_t)chunk_rows + CP_BLOCK - 1) / CP_BLOCK;
    return align_up(blocks * cp_block_bytes(m->kind, m->cols), CP_CHUNK_ALIGN);
}

int32_t cp_num_blocks(const cp_matrix *m)
{
    return (int32_t)(((int64_t)m->rows + CP_BLOCK - 1) / CP_BLOCK);
}

int cp_matrix_valid(const cp_matrix *m, int32_t rows, int32_t cols)
{
    uint64_t full, last_rows;
    if (m->data == NULL || m->rows != rows || m->cols != cols || rows <= 0 || cols <= 0)
        return 0;
    if (m->kind == CP_KIND_F32)
        return m->num_bytes == (uint64_t)rows * (uint64_t)cols * 4;
    if (m->kind != CP_KIND_INT4 && m->kind != CP_KIND_INT8)
        return 0;
    if (cols % CP_GROUP || m->chunk_rows <= 0 || m->chunk_rows % CP_BLOCK)
        return 0;
    full = ((uint64_t)rows - 1) / (uint64_t)m->chunk_rows;
    last_rows = (uint64_t)rows - full * (uint64_t)m->chunk_rows;
    return m->num_bytes == full * cp_chunk_bytes(m, m->chunk_rows) +
                               cp_chunk_bytes(m, (int32_t)last_rows);
}

static int chunked(const cp_matrix *m, int32_t rows, int32_t cols)
{
    return m->kind != CP_KIND_F32 && cp_matrix_valid(m, rows, cols);
}

/* Whether a layer has all or none of what belongs together. */
static int options_valid(const cp_layer *l)
{
    return l->window >= 0 && !l->rope_cos == !l->rope_sin && !l->q_bias == !l->k_bias &&
           !l->q_bias == !l->v_bias && !l->q_norm == !l->k_norm &&
           !l->attention_out_norm == !l->mlp_out_norm;
}

int cp_group_valid(const cp_group *g, cp_fault *fault)
{
    int32_t i, q_dim, kv_dim;
    fault->layer = -1;
    fault->row = -1;
    if (g->hidden_size <= 0 || g->intermediate_size <= 0 || g->num_heads <= 0 ||
        g->num_kv_heads <= 0 || g->head_dim <= 0 || g->num_layers <= 0 || g->num_positions <= 0)
        return 0;
    if (g->head_dim % 8 || g->head_dim > 65536 || g->num_heads > 65536 / 8 ||
        g->num_heads % g->num_kv_heads)
        return 0;
    if ((int64_t)g->num_heads * g->head_dim > INT32_MAX / 64)
        return 0;
    q_dim = g->num_heads * g->head_dim;
    kv_dim = g->num_kv_heads * g->head_dim;
    for (i = 0; i < g->num_layers; i++) {
        const cp_layer *l = &g->layers[i];
        fault->layer = i;
        if (l->input_norm == NULL || l->post_norm == NULL || !options_valid(l) ||
            !chunked(&l->q, q_dim, g->hidden_size) || !chunked(&l->k, kv_dim, g->hidden_size) ||
            !chunked(&l->v, kv_dim, g->hidden_size) || !chunked(&l->o, g->hidden_size, q_dim) ||
            !chunked(&l->gate, g->intermediate_size, g->hidden_size) ||
            !chunked(&l->up, g->intermediate_size, g->hidden_size) ||
            !chunked(&l->down, g->hidden_size, g->intermediate_size))
            return 0;
    }
    fault->layer = -1;
    return 1;
}

int32_t cp_misplaced_sequence(const cp_group *g, const cp_sequence *sequences, int32_t n)
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

void *cp_take(cp_arena *arena, uint64_t count, uint64_t size)
{
    void *piece = arena->base ? arena->base + arena->used : NULL;
    arena->used += align_up(count * size, 64);
    return piece;
}

cp_acts cp_take_acts(cp_arena *arena, const cp_path *path, int32_t rows, int32_t cols,
                     int32_t terms, int32_t int4_only, int32_t passing)
{
    cp_acts acts;
    uint64_t n = (uint64_t)rows, groups = (uint64_t)(cols / CP_GROUP);
    uint64_t wide_size = (uint64_t)(CP_GROUP * (path->wide_per_term ? terms : 1));
    acts.wide = NULL;
    acts.q = cp_take(arena, n * (uint64_t)terms * (uint64_t)cols, 1);
    if (path->wide_rows)
        acts.wide = cp_take(arena, n * groups * wide_size, 2);
    acts.d = cp_take(arena, n * groups, sizeof(float));
    acts.ds = cp_take(arena, n * groups, sizeof(float));
    acts.bias = cp_take(arena, n * groups, sizeof(int32_t));
    acts.rows = rows;
    acts.cols = cols;
    acts.terms = terms;
    acts.wide_per_term = path->wide_per_term;
    acts.int4_only = int4_only;
    acts.passing = passing;
    return acts;
}
