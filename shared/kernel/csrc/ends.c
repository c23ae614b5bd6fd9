/* What lies before and after the layers: the embedding, a single matmul, the logits. */
#include "fpmode.h"
#include "internal.h"
#include "numbers.h"

uint64_t cp_matmul_scratch(const cp_matrix *matrix, int32_t num_rows)
{
    cp_arena arena = {NULL, 0};
    cp_take_acts(&arena, num_rows, matrix->cols, 2);
    return arena.used;
}

int cp_matmul(const cp_matrix *matrix, const float *x, int32_t num_rows, int32_t terms,
              float *out, void *scratch, uint64_t scratch_bytes, cp_fault *fault)
{
    cp_arena arena = {scratch, 0};
    cp_acts acts;
    cp_fpmode mode;
    fault->layer = fault->row = -1;
    if (num_rows <= 0 || terms < 1 || terms > 2 || matrix->kind == CP_KIND_F32 ||
        !cp_matrix_valid(matrix, matrix->rows, matrix->cols))
        return CP_BAD_SIZE;
    acts = cp_take_acts(&arena, num_rows, matrix->cols, terms);
    if (scratch == NULL || arena.used > scratch_bytes)
        return CP_BAD_SCRATCH;
    mode = cp_fpmode_enter();
    fault->row = cp_quantize(x, num_rows, matrix->cols, terms, &acts);
    if (fault->row < 0) {
        cp_multiply_all(matrix, &acts, num_rows, out);
        fault->row = cp_unfinished_row(out, num_rows, matrix->rows);
    }
    cp_fpmode_leave(mode);
    return fault->row < 0 ? CP_OK : CP_NOT_FINITE;
}

uint64_t cp_logits_scratch(const cp_matrix *head, int32_t num_rows)
{
    cp_arena arena = {NULL, 0};
    cp_take(&arena, (uint64_t)num_rows * (uint64_t)head->cols, sizeof(float));
    return arena.used + cp_matmul_scratch(head, num_rows);
}

int cp_logits(const cp_matrix *head, const float *norm, float norm_eps, const float *rows,
              int32_t n, float *out, void *scratch, uint64_t scratch_bytes, cp_fault *fault)
{
    cp_arena arena = {scratch, 0};
    float *normed;
    cp_fpmode mode;
    int32_t r;
    fault->layer = fault->row = -1;
    if (n <= 0 || head->kind == CP_KIND_F32 || !cp_matrix_valid(head, head->rows, head->cols))
        return CP_BAD_SIZE;
    if (scratch == NULL || cp_logits_scratch(head, n) > scratch_bytes)
        return CP_BAD_SCRATCH;
    normed = cp_take(&arena, (uint64_t)n * (uint64_t)head->cols, sizeof(float));
    mode = cp_fpmode_enter();
    for (r = 0; r < n && fault->row < 0; r++) {
        size_t at = (size_t)r * (size_t)head->cols;
        if (!cp_rms_norm(rows + at, norm, norm_eps, head->cols, normed + at))
            fault->row = r;
    }
    cp_fpmode_leave(mode);
    if (fault->row >= 0)
        return CP_NOT_FINITE;
    return cp_matmul(head, normed, n, 2, out, arena.base + arena.used,
                     scratch_bytes - arena.used, fault);
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

int cp_embed(const cp_matrix *matrix, const int32_t *token_ids, int32_t n, float *out,
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
    }
    cp_fpmode_leave(mode);
    return CP_OK;
}
