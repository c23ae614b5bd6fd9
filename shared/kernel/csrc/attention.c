/* Attention over KV pages, with a running softmax, and the writing of new KV rows. */
#include "internal.h"
#include "numbers.h"

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

int32_t cp_attention(const cp_path *path, const cp_group *g, const cp_sequence *s, int32_t layer,
                     int32_t first_row, int32_t end_row, int32_t first_head, int32_t end_head,
                     const float *q, float *out, float *tile, float *state)
{
    int32_t head_dim = g->head_dim, num = end_head - first_head;
    int32_t kv_head = first_head / (g->num_heads / g->num_kv_heads);
    size_t row_size = (size_t)g->num_heads * (size_t)head_dim;
    size_t start = (size_t)first_head * (size_t)head_dim, used = (size_t)(num * head_dim);
    float *max = state, *total = state + (end_row - first_row) * num;
    int64_t end = s->start_position + end_row, page;
    int32_t t, h, i;
    for (t = first_row; t < end_row; t++) {
        float *row = out + (size_t)t * row_size + start;
        for (i = 0; i < num; i++) {
            max[(t - first_row) * num + i] = cp_float(0xff800000u); /* -infinity */
            total[(t - first_row) * num + i] = 0.0f;
        }
        for (i = 0; i < (int32_t)used; i++)
            row[i] = 0.0f;
    }
    for (page = 0; page * CP_PAGE < end; page++) {
        int64_t base = page * CP_PAGE, first = base - s->start_position;
        int32_t filled = end - base < CP_PAGE ? (int32_t)(end - base) : CP_PAGE;
        /* Widened once for all query heads and rows that read it. */
        path->widen(page_part(g, s, page, layer, kv_head, 0),
                    page_part(g, s, page, layer, kv_head, 1), filled, head_dim, tile);
        for (t = first > first_row ? (int32_t)first : first_row; t < end_row; t++) {
            int64_t present = s->start_position + t - base + 1;
            int32_t n = present < CP_PAGE ? (int32_t)present : CP_PAGE;
            int32_t at = (t - first_row) * num;
            if (!path->attend(q + (size_t)t * row_size + start, num, tile, head_dim, n,
                              g->score_scale, max + at, total + at,
                              out + (size_t)t * row_size + start))
                return t;
        }
    }
    for (t = first_row; t < end_row; t++)
        for (h = 0; h < num; h++) {
            float *head = out + (size_t)t * row_size + start + (size_t)(h * head_dim);
            float sum = total[(t - first_row) * num + h];
            for (i = 0; i < head_dim; i++)
                head[i] /= sum;
        }
    return -1;
}
