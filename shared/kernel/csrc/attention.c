/* Attention over KV pages, with a running softmax, and the writing of new KV rows. */
#include "internal.h"
#include "numbers.h"
#include "rows.h"

/* Where the keys (part 0) or values (part 1) of a head lie in a page: (16, head_dim). */
static uint16_t *page_part(const cp_group *g, const cp_sequence *s, int64_t page, int32_t layer,
                           int32_t kv_head, int32_t part)
{
    size_t tile = (size_t)CP_PAGE * (size_t)g->head_dim;
    size_t head = (size_t)layer * (size_t)g->num_kv_heads + (size_t)kv_head;
    return s->pages[page] + (head * 2 + (size_t)part) * tile;
}

void cp_store_kv(const cp_path *path, const cp_group *g, const cp_sequence *s, int32_t layer,
                 int64_t position, const float *k, const float *v)
{
    size_t slot = (size_t)(position % CP_PAGE) * (size_t)g->head_dim;
    int32_t h;
    for (h = 0; h < g->num_kv_heads; h++, k += g->head_dim, v += g->head_dim) {
        path->to_half(k, page_part(g, s, position / CP_PAGE, layer, h, 0) + slot, g->head_dim);
        path->to_half(v, page_part(g, s, position / CP_PAGE, layer, h, 1) + slot, g->head_dim);
    }
}

/* What attention to the pages that were read has come to, of rows and query heads; `apart` from row to
 * row, `heads_apart` from head to head. */
typedef struct {
    float *max, *total;
    int32_t apart, heads_apart;
} running;

static void start(const running *state, int32_t rows, int32_t num, float *out, size_t stride,
                  int32_t used)
{
    int32_t t, h, i;
    for (t = 0; t < rows; t++) {
        for (h = 0; h < num; h++) {
            state->max[t * state->apart + h * state->heads_apart] = cp_float(0xff800000u);
            state->total[t * state->apart + h * state->heads_apart] = 0.0f;
        }
        for (i = 0; i < used; i++)
            out[(size_t)t * stride + (size_t)i] = 0.0f;
    }
}

static void finish(const running *state, int32_t rows, int32_t num, int32_t head_dim, float *out,
                   size_t stride)
{
    int32_t t, h, i;
    for (t = 0; t < rows; t++)
        for (h = 0; h < num; h++) {
            float *head = out + (size_t)t * stride + (size_t)(h * head_dim);
            float sum = state->total[t * state->apart + h * state->heads_apart];
            for (i = 0; i < head_dim; i++)
                head[i] /= sum;
        }
}

/* (rows, num * head_dim) -> (num * head_dim, rows) */
static void turn(const float *q, size_t stride, int32_t used, float *columns)
{
    int32_t i, t;
    for (i = 0; i < used; i++)
        for (t = 0; t < CP_ATTENTION_ROWS; t++)
            columns[i * CP_ATTENTION_ROWS + t] = q[(size_t)t * stride + (size_t)i];
}

/* Row t against positions first..n-1 of a page, in plain C: with a soft cap, or where a window begins
 * inside the page. `tile` is cp_widen_c's. */
static int attend_part(const cp_group *g, const running *now, int32_t t, int32_t num,
                       const float *q, const float *tile, int32_t first, int32_t n, float *out)
{
    int32_t h;
    for (h = 0; h < num; h++) {
        int32_t at = t * now->apart + h * now->heads_apart;
        if (!cp_attend_part_c(q + h * g->head_dim, tile, g->head_dim, first, n, g->score_scale,
                              g->score_softcap, now->max + at, now->total + at,
                              out + h * g->head_dim))
            return 0;
    }
    return 1;
}

int32_t cp_attention(const cp_path *path, const cp_group *g, const cp_sequence *s, int32_t layer,
                     int32_t first_row, int32_t end_row, int32_t first_head, int32_t end_head,
                     const float *q, float *out, float *tile, float *state, float *columns)
{
    int32_t head_dim = g->head_dim, num = end_head - first_head, rows = end_row - first_row;
    int32_t kv_head = first_head / (g->num_heads / g->num_kv_heads);
    int32_t together = columns && rows == CP_ATTENTION_ROWS;
    size_t stride = (size_t)g->num_heads * (size_t)head_dim;
    size_t from = (size_t)first_row * stride + (size_t)first_head * (size_t)head_dim;
    running now = {state, state + rows * num, together ? 1 : num, together ? rows : 1};
    int64_t row0 = s->start_position + first_row, end = row0 + rows, page;
    /* The first position that row 0 sees is `seen`; every later row sees one less. */
    int64_t window = g->layers[layer].window, seen = window && row0 >= window ? row0 - window + 1 : 0;
    float *plain = tile + 2 * CP_PAGE * head_dim;
    int32_t t, h;
    q += from;
    out += from;
    start(&now, rows, num, out, stride, num * head_dim);
    if (together)
        turn(q, stride, num * head_dim, columns);
    for (page = seen / CP_PAGE; page * CP_PAGE < end; page++) {
        int64_t base = page * CP_PAGE;
        int32_t filled = end - base < CP_PAGE ? (int32_t)(end - base) : CP_PAGE;
        int cut = g->score_softcap != 0.0f || (window && end - window > base);
        /* Widened once for all query heads and rows that read it. */
        path->widen(page_part(g, s, page, layer, kv_head, 0),
                    page_part(g, s, page, layer, kv_head, 1), filled, head_dim, tile);
        if (cut)
            cp_widen_c(page_part(g, s, page, layer, kv_head, 0),
                       page_part(g, s, page, layer, kv_head, 1), filled, head_dim, plain);
        if (together && row0 >= base && !cut) {
            int32_t first = row0 - base < CP_PAGE ? (int32_t)(row0 - base) : CP_PAGE, bad = 0;
            for (h = 0; h < num; h++)
                bad |= path->attend_rows(columns + h * CP_ATTENTION_ROWS * head_dim, tile,
                                         head_dim, first, g->score_scale, now.max + h * rows,
                                         now.total + h * rows, out + h * head_dim, stride);
            for (t = 0; bad; t++, bad >>= 1)
                if (bad & 1)
                    return first_row + t;
            continue;
        }
        for (t = base > row0 ? (int32_t)(base - row0) : 0; t < rows; t++) {
            int64_t present = row0 + t - base + 1;
            int32_t n = present < CP_PAGE ? (int32_t)present : CP_PAGE;
            int64_t first = window ? row0 + t - window + 1 - base : 0;
            if (first >= CP_PAGE)
                continue;
            if (first > 0 || g->score_softcap != 0.0f) {
                size_t row = (size_t)t * stride;
                if (!attend_part(g, &now, t, num, q + row, plain, first > 0 ? (int32_t)first : 0, n,
                                 out + row))
                    return first_row + t;
                continue;
            }
            for (h = 0; h < num; h += together ? 1 : num) {
                int32_t at = t * now.apart + h * now.heads_apart;
                size_t row = (size_t)t * stride + (size_t)(h * head_dim);
                if (!path->attend(q + row, together ? 1 : num, tile, head_dim, n, g->score_scale,
                                  now.max + at, now.total + at, out + row))
                    return first_row + t;
            }
        }
    }
    finish(&now, rows, num, head_dim, out, stride);
    return -1;
}
