/* The small operations of a decode step, and attention of a prefill, on a CPU; ops/cpu_kernels.py says what each computes.

A function spreads its rows, or its rows and key/value heads, over `threads` of the OpenMP pool that torch uses too.

N rows, E width, H query heads, K key/value heads, G = H / K, D head dimension. */

#include "cpu_values.h"

typedef struct {  /* [N, K, G, D]; G is 1 for keys and values */
    const void *data;
    int64_t row, head, query, dim;
} Heads;

typedef struct {  /* of an attention, the same in every step */
    int64_t num_kv_heads, num_queries, head_dim;
    int64_t window;          /* tokens, the query's own included; 0: all */
    int64_t is_interleaved;  /* rotary pairs are neighbours */
    double scale, softcap;   /* softcap 0: none */
} Attention;

typedef struct {  /* keys and values [num_blocks, K, block_size, D], which share their strides */
    void *keys, *values;
    int64_t block, head, place, block_size, num_blocks;
    int64_t reach;  /* no sequence has more tokens than `reach`, its new ones included */
} Workspace;

typedef struct {  /* where the tokens of a sequence lie */
    const int64_t *blocks;   /* the block of each block_size tokens, or, with offsets, of each token */
    const int64_t *offsets;  /* the place of each token in its block; NULL: they follow each other */
} Table;

typedef struct {  /* `count` neighboring tokens of a batch, from n on, at `position` and after in their sequence */
    int64_t n, count, position;
    Table table;
} Span;

typedef struct {  /* rows of signed rotations [N, R], and what a head adds; NULL: none */
    const void *cos, *sin;
    int64_t row, width;
    const void *sinks;   /* [H] */
    const float *alibi;  /* [H] */
} Extras;

enum { LAYER, RMS, RMS_FP32, RMS_OFFSET };

/* In lanes, because a maximum that may meet NaN, which it passes over, is not spread over a vector by itself. */
static float largest(const float *x, int64_t count) {
    float lanes[64], top = -INFINITY;
    int64_t whole = count / 64 * 64;
    for (int l = 0; l < 64; l++) lanes[l] = -INFINITY;
    for (int64_t i = 0; i < whole; i += 64)
        for (int l = 0; l < 64; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (int64_t i = whole; i < count; i++) top = x[i] > top ? x[i] : top;
    for (int half = 32; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] = lanes[l + half] > lanes[l] ? lanes[l + half] : lanes[l];
    return lanes[0] > top ? lanes[0] : top;
}

/* Norms one row in place. */
static void norm_row(float *x, const float *gamma, const float *beta, int64_t width, int kind, float eps, int is_bf16) {
    float mean = 0.0f;
    if (kind == LAYER) {
        for (int64_t i = 0; i < width; i++) mean += x[i];
        mean /= width;
    }
    float squares = 0.0f;
    for (int64_t i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
    float rstd = 1.0f / sqrtf(squares / width + eps);
    float offset = kind == RMS_OFFSET ? 1.0f : 0.0f;
    int rounds_first = is_bf16 && kind == RMS;
    if (rounds_first) for (int64_t i = 0; i < width; i++) x[i] = widen(narrow(x[i] * rstd)) * gamma[i];
    else if (gamma) for (int64_t i = 0; i < width; i++) x[i] = (x[i] - mean) * rstd * (offset + gamma[i]);
    else for (int64_t i = 0; i < width; i++) x[i] = (x[i] - mean) * rstd;
    if (beta) for (int64_t i = 0; i < width; i++) x[i] += beta[i];
}

enum { GROUP = 16, BATCH = 64 };

/* Norms `rows` fp32 rows, at most GROUP, that lie by columns, side by side. Sums go in batches, which rounds less. The rows
   are the vectors: without the pragma gcc takes the last loop's columns, which are gathered. */
static inline __attribute__((always_inline)) void norm_columns_of(
    const Matrix *input, const Matrix *residual, const float *gamma, const float *beta, const Matrix *output,
    const Matrix *sum, int64_t first, int64_t rows, int64_t width, int kind, float eps) {
    const float *x = (const float *)input->data + first;
    float *y = (float *)output->data + first;
    int64_t step = input->column;
    float mean[GROUP] = {0}, squares[GROUP] = {0}, rstd[GROUP];
    if (residual) {
        const float *added = (const float *)residual->data + first;
        float *total = (float *)sum->data + first;
        for (int64_t i = 0; i < width; i++)
            for (int64_t n = 0; n < rows; n++)
                total[i * sum->column + n] = x[i * step + n] + added[i * residual->column + n];
        x = total, step = sum->column;
    }
    for (int64_t start = 0; kind == LAYER && start < width; start += BATCH) {
        float part[GROUP] = {0};
        for (int64_t i = start; i < width && i < start + BATCH; i++)
            for (int64_t n = 0; n < rows; n++) part[n] += x[i * step + n];
        for (int64_t n = 0; n < rows; n++) mean[n] += part[n] / width;
    }
    for (int64_t start = 0; start < width; start += BATCH) {
        float part[GROUP] = {0};
        for (int64_t i = start; i < width && i < start + BATCH; i++)
            for (int64_t n = 0; n < rows; n++) part[n] += (x[i * step + n] - mean[n]) * (x[i * step + n] - mean[n]);
        for (int64_t n = 0; n < rows; n++) squares[n] += part[n];
    }
    for (int64_t n = 0; n < rows; n++) rstd[n] = 1.0f / sqrtf(squares[n] / width + eps);
    for (int64_t i = 0; i < width; i++) {
        float scale = (kind == RMS_OFFSET ? 1.0f : 0.0f) + gamma[i], shift = beta ? beta[i] : 0.0f;
#pragma omp simd
        for (int64_t n = 0; n < rows; n++)
            y[i * output->column + n] = (x[i * step + n] - mean[n]) * rstd[n] * scale + shift;
    }
}

static void norm_columns(const Matrix *input, const Matrix *residual, const float *gamma, const float *beta,
                         const Matrix *output, const Matrix *sum, int64_t num_rows, int64_t width, int kind, float eps,
                         int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < num_rows; first += GROUP) {
        int64_t rows = num_rows - first;
        if (rows >= GROUP)  /* a constant, for the compiler */
            norm_columns_of(input, residual, gamma, beta, output, sum, first, GROUP, width, kind, eps);
        else norm_columns_of(input, residual, gamma, beta, output, sum, first, rows, width, kind, eps);
    }
}

/* output = norm(input + residual), sum = input + residual; residual and sum are both there or both NULL. */
int norm(const Matrix *input, const Matrix *residual, const void *gamma, const void *beta, const Matrix *output,
         const Matrix *sum, int64_t num_rows, int64_t width, int64_t kind, double eps, int64_t is_bf16,
         int64_t threads) {
    int by_columns = input->row == 1 && output->row == 1 && (!residual || (residual->row == 1 && sum->row == 1));
    if (by_columns && !is_bf16) {
        norm_columns(input, residual, gamma, beta, output, sum, num_rows, width, kind, eps, threads);
        return 0;
    }
    float *weights = malloc((2 + 2 * threads) * width * sizeof(float));
    if (!weights) return NO_MEMORY;
    load(weights, gamma, 0, 1, width, is_bf16);
    if (beta) load(weights + width, beta, 0, 1, width, is_bf16);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *x = weights + (2 + 2 * thread) * width, *added = x + width;
        for (int64_t n = thread * num_rows / threads; n < (thread + 1) * num_rows / threads; n++) {
            load(x, input->data, n * input->row, input->column, width, is_bf16);
            if (residual) {
                load(added, residual->data, n * residual->row, residual->column, width, is_bf16);
                for (int64_t i = 0; i < width; i++) x[i] = round_to(x[i] + added[i], is_bf16);
                store(sum->data, n * sum->row, sum->column, x, width, is_bf16);
            }
            norm_row(x, weights, beta ? weights + width : NULL, width, kind, eps, is_bf16);
            store(output->data, n * output->row, output->column, x, width, is_bf16);
        }
    }
    free(weights);
    return 0;
}

enum { CHUNK = 512 };

/* output = activation(gate) * up, or activation(gate) where up is NULL, of lines whose values are neighbours. */
int gated_activation(const Matrix *gate, const Matrix *up, const Matrix *output, int64_t num_lines, int64_t width,
                     int64_t kind, int64_t is_bf16, int64_t threads) {
    int64_t chunks = (width + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < num_lines * chunks; part++) {
        int64_t line = part / chunks, start = part % chunks * CHUNK;
        int64_t count = width - start < CHUNK ? width - start : CHUNK;
        float x[CHUNK], factor[CHUNK];
        load(x, gate->data, line * gate->row + start, 1, count, is_bf16);
        activate(x, count, kind);
        if (up) {
            load(factor, up->data, line * up->row + start, 1, count, is_bf16);
            for (int64_t i = 0; i < count; i++) x[i] = round_to(x[i], is_bf16) * factor[i];
        }
        store(output->data, line * output->row + start, 1, x, count, is_bf16);
    }
    return 0;
}

/* Rotates the first `width` dimensions of x by signed rows; y = x cos + partner sin. */
static void rotate(float *x, float *scratch, const float *cos, const float *sin, int64_t width, int is_interleaved) {
    int64_t half = width / 2;
    memcpy(scratch, x, width * sizeof(float));
    if (is_interleaved) {
        for (int64_t i = 0; i < half; i++) {
            x[2 * i] = scratch[2 * i] * cos[2 * i] + scratch[2 * i + 1] * sin[2 * i];
            x[2 * i + 1] = scratch[2 * i + 1] * cos[2 * i + 1] + scratch[2 * i] * sin[2 * i + 1];
        }
        return;
    }
    for (int64_t i = 0; i < half; i++) x[i] = scratch[i] * cos[i] + scratch[half + i] * sin[i];
    for (int64_t i = 0; i < half; i++) x[half + i] = scratch[half + i] * cos[half + i] + scratch[i] * sin[half + i];
}

/* Turns scores [count] into weights in place and returns 1 / their sum, of `top`, the largest, and the sink. */
static float weigh(float *scores, int64_t count, const float *sink) {
    float top = largest(scores, count);
    if (sink && *sink > top) top = *sink;
    float sum = sink ? fast_exp(*sink - top) : 0.0f;
    for (int64_t j = 0; j < count; j++) {
        scores[j] = fast_exp(scores[j] - top);
        sum += scores[j];
    }
    return 1.0f / sum;
}

static void adjust(float *scores, int64_t count, double softcap, const float *slope, int64_t distance) {
    if (softcap > 0.0) for (int64_t j = 0; j < count; j++) scores[j] = tanhf(scores[j] / (float)softcap) * (float)softcap;
    if (slope) for (int64_t j = 0; j < count; j++) scores[j] -= *slope * (distance - j);
}

enum { MOST_QUERIES = 4, MOST_VECTORS = 4 };  /* at once: their sums stay in registers */

typedef struct {  /* keys or values that are neighbors, whole vectors each */
    const void *data;
    int64_t step;  /* from one to the next */
    int is_bf16;
} Rows;

/* sums[g][t] += query g . key t in some vectors of their dimensions, from `begin` on, where the sums are 0 at first. */
static inline __attribute__((always_inline)) void score_part(const float *queries, int64_t width, const Rows *keys,
                                                             int64_t first, int64_t count, int64_t begin, int num_queries,
                                                             int vectors, Vector sums[MOST_QUERIES][LANES]) {
    Vector q[MOST_QUERIES][MOST_VECTORS];
    for (int g = 0; g < num_queries; g++)
        for (int v = 0; v < vectors; v++) q[g][v] = vector_at(queries, g * width + begin + v * LANES, 0);
    for (int64_t t = 0; t < count; t++) {
        int64_t place = (first + t) * keys->step + begin;
        Vector sum[MOST_QUERIES] = {{0}};
        for (int g = 0; g < num_queries && begin; g++) sum[g] = sums[g][t];
        for (int v = 0; v < vectors; v++) {
            Vector key = vector_at(keys->data, place + v * LANES, keys->is_bf16);
            for (int g = 0; g < num_queries; g++) sum[g] += q[g][v] * key;
        }
        for (int g = 0; g < num_queries; g++) sums[g][t] = sum[g];
    }
}

/* context[g] += the sum of weights[g][t] value t, likewise. */
static inline __attribute__((always_inline)) void add_part(float *context, int64_t width, const Rows *values,
                                                           const float *weights, int64_t reach, int64_t count,
                                                           int64_t begin, int num_queries, int vectors) {
    Vector sums[MOST_QUERIES][MOST_VECTORS];
    for (int g = 0; g < num_queries; g++)
        for (int v = 0; v < vectors; v++) sums[g][v] = vector_at(context, g * width + begin + v * LANES, 0);
    for (int64_t t = 0; t < count; t++) {
        int64_t place = t * values->step + begin;
        for (int v = 0; v < vectors; v++) {
            Vector value = vector_at(values->data, place + v * LANES, values->is_bf16);
            for (int g = 0; g < num_queries; g++) sums[g][v] += weights[g * reach + t] * value;
        }
    }
    for (int g = 0; g < num_queries; g++)
        for (int v = 0; v < vectors; v++) *(Vector *)(context + g * width + begin + v * LANES) = sums[g][v];
}

/* Calls PART with constants for the number of queries and of vectors, and for the kind of the rows, over all of `width`. */
#define BY_VECTORS(PART, NUM_QUERIES)                                                                       \
    for (int64_t begin = 0; begin < width;) {                                                               \
        int vectors = width - begin >= 4 * LANES ? 4 : width - begin >= 2 * LANES ? 2 : 1;                  \
        if (vectors == 4) PART(begin, NUM_QUERIES, 4);                                                      \
        else if (vectors == 2) PART(begin, NUM_QUERIES, 2);                                                 \
        else PART(begin, NUM_QUERIES, 1);                                                                   \
        begin += vectors * LANES;                                                                           \
    }
#define BY_QUERIES(PART, num_queries)                                                                       \
    switch (num_queries) {                                                                                  \
    case 1: BY_VECTORS(PART, 1) break;                                                                      \
    case 2: BY_VECTORS(PART, 2) break;                                                                      \
    case 3: BY_VECTORS(PART, 3) break;                                                                      \
    default: BY_VECTORS(PART, 4)                                                                            \
    }

/* scores[g][t] = query g . key t of up to MOST_QUERIES queries [width], whole vectors. */
static inline __attribute__((always_inline)) void score_keys_of(const float *queries, int64_t width, int num_queries,
                                                                const Rows *keys, int64_t count, float *scores,
                                                                int64_t reach) {
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t rows = count - first < LANES ? count - first : LANES;
        Vector sums[MOST_QUERIES][LANES];
#define SCORE(begin, queries_at_once, vectors) \
    score_part(queries, width, keys, first, rows, begin, queries_at_once, vectors, sums)
        BY_QUERIES(SCORE, num_queries)
#undef SCORE
        for (int g = 0; g < num_queries; g++) {
            Vector sum = sum_of_each(sums[g]);
            float *to = scores + g * reach + first;
            if (rows == LANES) *(Vector *)to = sum;
            else for (int64_t t = 0; t < rows; t++) to[t] = sum[t];
        }
    }
}

static inline __attribute__((always_inline)) void add_values_of(float *context, int64_t width, int num_queries,
                                                                const Rows *values, int64_t count,
                                                                const float *weights, int64_t reach) {
#define ADD(begin, queries_at_once, vectors) \
    add_part(context, width, values, weights, reach, count, begin, queries_at_once, vectors)
    BY_QUERIES(ADD, num_queries)
#undef ADD
}

static void score_keys(const float *queries, int64_t width, int num_queries, const Rows *keys, int64_t count,
                       float *scores, int64_t reach) {
    Rows wide = {keys->data, keys->step, 0}, narrow_rows = {keys->data, keys->step, 1};
    if (keys->is_bf16) score_keys_of(queries, width, num_queries, &narrow_rows, count, scores, reach);
    else score_keys_of(queries, width, num_queries, &wide, count, scores, reach);
}

static void add_values(float *context, int64_t width, int num_queries, const Rows *values, int64_t count,
                       const float *weights, int64_t reach) {
    Rows wide = {values->data, values->step, 0}, narrow_rows = {values->data, values->step, 1};
    if (values->is_bf16) add_values_of(context, width, num_queries, &narrow_rows, count, weights, reach);
    else add_values_of(context, width, num_queries, &wide, count, weights, reach);
}

enum { TILE = 32 };  /* keys at once: of 64 dimensions in fp32 8 KiB, which the first cache holds beside the scores */

static int queries_at_once(int64_t rest) { return rest < MOST_QUERIES ? rest : MOST_QUERIES; }

static int64_t whole_vectors(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

/* `count` keys or values: where they lie, or, if they are not whole vectors, as fp32 in `tile`, whose rest is 0. */
static Rows rows_of(const void *cache, int64_t start, int64_t count, int64_t place, int64_t dim, float *tile,
                    int is_bf16) {
    if (dim % LANES == 0) return (Rows){(const char *)cache + start * (is_bf16 ? 2 : 4), place, is_bf16};
    for (int64_t j = 0; j < count; j++) load(tile + j * whole_vectors(dim), cache, start + j * place, 1, dim, is_bf16);
    return (Rows){tile, whole_vectors(dim), 0};
}

/* Where the key and the value of a sequence's token j lie, of one head. */
static int64_t place_of(const Workspace *kv, const Table *table, int64_t h, int64_t j) {
    int64_t block = table->offsets ? table->blocks[j] : table->blocks[j / kv->block_size];
    int64_t offset = table->offsets ? table->offsets[j] : j % kv->block_size;
    return block * kv->block + h * kv->head + offset * kv->place;
}

/* Tokens from j on to the last one that lie side by side in a block, at most a tile of them. */
static int64_t run_from(const Workspace *kv, const Table *table, int64_t j, int64_t last) {
    int64_t most = last + 1 - j < TILE ? last + 1 - j : TILE, run = 1;
    if (!table->offsets) {
        int64_t rest = kv->block_size - j % kv->block_size;
        return rest < most ? rest : most;
    }
    while (run < most && table->blocks[j + run] == table->blocks[j] && table->offsets[j + run] == table->offsets[j] + run)
        run++;
    return run;
}

/* Asks for `count` keys and values of a sequence from j on, if it has them, into the second cache: the first can wait
   for too few lines at once to be fed from memory at its speed. */
static void ask_for(const Workspace *kv, const Span *span, int64_t h, int64_t j, int64_t count, int64_t dim,
                    int is_bf16) {
    if (j > span->position) return;
    int64_t bytes = is_bf16 ? 2 : 4, start = place_of(kv, &span->table, h, j) * bytes;
    if (kv->place != dim) return;  /* other layouts than the workspace's are left to the processor */
    for (int64_t i = start; i < start + count * kv->place * bytes; i += 64) {
        __builtin_prefetch((const char *)kv->keys + i, 0, 2);
        __builtin_prefetch((const char *)kv->values + i, 0, 2);
    }
}

typedef struct {  /* a thread's own */
    float *queries, *context;             /* [queries of a span, whole vectors of D] */
    float *tile, *cos, *sin, *row, *spare;
    float *scores;                        /* [queries of a span, reach], and zeros */
} Scratch;

static int64_t scratch_size(const Attention *a, int64_t tokens, int64_t reach) {
    int64_t wide = whole_vectors(a->head_dim), queries = tokens * a->num_queries;
    return (2 * queries + TILE) * wide + 4 * a->head_dim + queries * reach + 16;
}

static Scratch scratch_at(float *memory, const Attention *a, int64_t tokens) {
    int64_t wide = whole_vectors(a->head_dim), dim = a->head_dim, all = tokens * a->num_queries * wide;
    float *tile = memory + 2 * all, *cos = tile + TILE * wide;
    return (Scratch){memory, memory + all, tile, cos, cos + dim, cos + 2 * dim, cos + 3 * dim, cos + 4 * dim};
}

/* Loads the rotations of token n; returns how many dimensions they are for. */
static int64_t load_rotations(const Extras *extras, int64_t n, Scratch *s, int is_bf16) {
    if (!extras->cos) return 0;
    load(s->cos, extras->cos, n * extras->row, 1, extras->width, is_bf16);
    load(s->sin, extras->sin, n * extras->row, 1, extras->width, is_bf16);
    return extras->width;
}

/* Writes the key, rotated, and the value of each token and one head. */
static void write_span(const Heads *k, const Heads *v, const Extras *extras, const Workspace *kv, const Attention *a,
                       const Span *span, int64_t h, Scratch *s, int is_bf16) {
    int64_t dim = a->head_dim;
    for (int64_t t = 0; t < span->count; t++) {
        int64_t n = span->n + t, here = place_of(kv, &span->table, h, span->position + t);
        int64_t width = load_rotations(extras, n, s, is_bf16);
        load(s->row, k->data, n * k->row + h * k->head, k->dim, dim, is_bf16);
        if (width) rotate(s->row, s->spare, s->cos, s->sin, width, a->is_interleaved);
        store(kv->keys, here, 1, s->row, dim, is_bf16);
        load(s->row, v->data, n * v->row + h * v->head, v->dim, dim, is_bf16);
        store(kv->values, here, 1, s->row, dim, is_bf16);
    }
}

/* The queries of the tokens and one key/value head, G for each token, rotated and scaled. */
static void load_queries(const Heads *q, const Extras *extras, const Attention *a, const Span *span, int64_t h,
                         Scratch *s, int is_bf16) {
    int64_t groups = a->num_queries, dim = a->head_dim, wide = whole_vectors(dim);
    for (int64_t t = 0; t < span->count; t++) {
        int64_t n = span->n + t, width = load_rotations(extras, n, s, is_bf16);
        for (int64_t g = 0; g < groups; g++) {
            float *query = s->queries + (t * groups + g) * wide;
            load(query, q->data, n * q->row + h * q->head + g * q->query, q->dim, dim, is_bf16);
            if (width) {
                rotate(query, s->spare, s->cos, s->sin, width, a->is_interleaved);
                for (int64_t i = 0; i < width; i++) query[i] = round_to(query[i], is_bf16);
            }
            for (int64_t i = 0; i < dim; i++) query[i] *= (float)a->scale;
        }
    }
}

/* The first token that the one at `position` attends to. */
static int64_t first_seen(const Attention *a, int64_t position) {
    return a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
}

/* Turns the scores of the tokens with the keys from `first` to `last` into weights, which are 0 for keys out of sight. */
static void weigh_span(const Extras *extras, const Attention *a, const Span *span, int64_t h, int64_t first,
                       int64_t last, int64_t reach, Scratch *s, int is_bf16) {
    int64_t groups = a->num_queries;
    for (int64_t i = 0; i < span->count * groups; i++) {
        float *scores = s->scores + i * reach;
        int64_t position = span->position + i / groups, head = h * groups + i % groups, from = first_seen(a, position);
        int64_t count = position + 1 - from;
        float sink = extras->sinks ? value(extras->sinks, head, is_bf16) : 0.0f, *seen = scores + from - first;
        adjust(seen, count, a->softcap, extras->alibi ? extras->alibi + head : NULL, position - from);
        float share = weigh(seen, count, extras->sinks ? &sink : NULL);
        for (int64_t j = 0; j < count; j++) seen[j] *= share;
        memset(scores, 0, (from - first) * sizeof(float));
        memset(seen + count, 0, (last - position) * sizeof(float));
    }
}

/* The tokens of a span and one key/value head attend, the G queries of each; keys and values are written. Asks for what
   `next` and `next_h` will read, if there is a next span. */
static void attend(const Heads *q, const Extras *extras, const Workspace *kv, const Attention *a, void *output,
                   const Span *span, int64_t h, const Span *next, int64_t next_h, Scratch *s, int is_bf16) {
    int64_t dim = a->head_dim, groups = a->num_queries, reach = kv->reach, wide = whole_vectors(dim);
    int64_t first = first_seen(a, span->position), last = span->position + span->count - 1, num = span->count * groups;
    load_queries(q, extras, a, span, h, s, is_bf16);
    for (int64_t j = first; j <= last;) {
        int64_t run = run_from(kv, &span->table, j, last);
        if (next) ask_for(kv, next, next_h, j, run, dim, is_bf16);
        Rows keys = rows_of(kv->keys, place_of(kv, &span->table, h, j), run, kv->place, dim, s->tile, is_bf16);
        for (int64_t i = 0; i < num; i += MOST_QUERIES) {
            int count = queries_at_once(num - i);
            if (span->position + (i + count - 1) / groups < j) continue;  /* all of these keys come later */
            score_keys(s->queries + i * wide, wide, count, &keys, run, s->scores + i * reach + j - first, reach);
        }
        j += run;
    }
    weigh_span(extras, a, span, h, first, last, reach, s, is_bf16);
    memset(s->context, 0, num * wide * sizeof(float));
    for (int64_t j = first; j <= last;) {
        int64_t run = run_from(kv, &span->table, j, last);
        Rows values = rows_of(kv->values, place_of(kv, &span->table, h, j), run, kv->place, dim, s->tile, is_bf16);
        for (int64_t i = 0; i < num; i += MOST_QUERIES) {
            int count = queries_at_once(num - i);
            if (span->position + (i + count - 1) / groups < j) continue;
            add_values(s->context + i * wide, wide, count, &values, run, s->scores + i * reach + j - first, reach);
        }
        j += run;
    }
    for (int64_t i = 0; i < num; i++) {
        int64_t head = (span->n + i / groups) * a->num_kv_heads * groups + h * groups + i % groups;
        store(output, head * dim, 1, s->context + i * wide, dim, is_bf16);
    }
}

/* Whether tokens 0 to `last` of a sequence lie in places that there are. */
static int fits(const Workspace *kv, const Table *table, int64_t last) {
    if (last < 0 || last >= kv->reach) return 0;
    for (int64_t i = 0; i <= (table->offsets ? last : last / kv->block_size); i++) {
        if (table->blocks[i] < 0 || table->blocks[i] >= kv->num_blocks) return 0;
        if (table->offsets && (table->offsets[i] < 0 || table->offsets[i] >= kv->block_size)) return 0;
    }
    return 1;
}

/* output [N, H D], dense, of one query a row, at `positions` [N] of the sequences of `tables` [N, n]. */
int decode_attention(const Heads *q, const Heads *k, const Heads *v, const Extras *extras, const Workspace *kv,
                     const Attention *a, const int64_t *positions, const int64_t *tables, int64_t table_row,
                     void *output, int64_t num_rows, int64_t is_bf16, int64_t threads) {
    for (int64_t n = 0; n < num_rows; n++)
        if (!fits(kv, &(Table){tables + n * table_row, NULL}, positions[n])) return BAD_PLACE;
    int64_t needed = scratch_size(a, 1, kv->reach);
    float *memory = calloc(threads * needed, sizeof(float));
    if (!memory) return NO_MEMORY;
    int64_t num_parts = num_rows * a->num_kv_heads;  /* by rows, whose heads are neighbors in the workspace */
#define ROW(n) (Span){n, 1, positions[n], {tables + (n) * table_row, NULL}}
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
        Scratch scratch = scratch_at(memory + thread * needed, a, 1);
        for (int64_t part = thread * num_parts / threads; part < (thread + 1) * num_parts / threads; part++) {
            int64_t heads = a->num_kv_heads, h = part % heads, after = part + 1 < num_parts ? part + 1 : part;
            Span row = ROW(part / heads), next = ROW(after / heads);
            write_span(k, v, extras, kv, a, &row, h, &scratch, is_bf16);
            attend(q, extras, kv, a, output, &row, h, after > part ? &next : NULL, after % heads, &scratch, is_bf16);
        }
    }
#undef ROW
    free(memory);
    return 0;
}

enum { SPAN = 16, SPAN_SCORES = 1 << 16 };  /* tokens at once, as long as their scores stay in the second cache */

/* output [N, H D], dense, of R packed sequences. The places of sequence r's tokens are those from `key_starts[r]` on, and
   its last tokens are the batch's from `starts[r]` on. */
int prefill_attention(const Heads *q, const Heads *k, const Heads *v, const Extras *extras, const Workspace *kv,
                      const Attention *a, const int64_t *blocks, const int64_t *offsets, const int32_t *starts,
                      const int32_t *key_starts, void *output, int64_t num_sequences, int64_t is_bf16, int64_t threads) {
    int64_t tokens = SPAN_SCORES / (a->num_queries * kv->reach), num_spans = 0;
    tokens = tokens < 1 ? 1 : tokens > SPAN ? SPAN : tokens;
    for (int64_t r = 0; r < num_sequences; r++) {
        Table table = {blocks + key_starts[r], offsets + key_starts[r]};
        if (!fits(kv, &table, key_starts[r + 1] - key_starts[r] - 1)) return BAD_PLACE;
        num_spans += (starts[r + 1] - starts[r] + tokens - 1) / tokens;
    }
    int64_t needed = scratch_size(a, tokens, kv->reach);
    Span *spans = malloc(num_spans * sizeof(Span));
    float *memory = calloc(threads * needed, sizeof(float));
    if (!memory || !spans) {
        free(memory), free(spans);
        return NO_MEMORY;
    }
    Span *span = spans;
    for (int64_t r = 0; r < num_sequences; r++) {
        int64_t count = starts[r + 1] - starts[r], earlier = key_starts[r + 1] - key_starts[r] - count;
        for (int64_t t = 0; t < count; t += tokens)
            *span++ = (Span){starts[r] + t, count - t < tokens ? count - t : tokens, earlier + t,
                             {blocks + key_starts[r], offsets + key_starts[r]}};
    }
    int64_t num_parts = num_spans * a->num_kv_heads;
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch = scratch_at(memory + omp_get_thread_num() * needed, a, tokens);
#pragma omp for schedule(static)
        for (int64_t part = 0; part < num_parts; part++)
            write_span(k, v, extras, kv, a, spans + part % num_spans, part / num_spans, &scratch, is_bf16);
#pragma omp for schedule(dynamic)
        for (int64_t part = 0; part < num_parts; part++)
            attend(q, extras, kv, a, output, spans + part % num_spans, part / num_spans, NULL, 0, &scratch, is_bf16);
    }
    free(memory), free(spans);
    return 0;
}

/* RMS norm of groups of `group` values with a gate before or after it; output [N, width], dense. `num_gamma` is of one
   group or of all. */
int gated_norm(const Matrix *input, const Matrix *gate, const void *gamma, void *output, int64_t num_rows, int64_t width,
               int64_t group, int64_t num_gamma, double eps, int64_t gates_first, int64_t is_bf16, int64_t threads) {
    float *scratch = malloc((num_gamma + 2 * threads * group) * sizeof(float));
    if (!scratch) return NO_MEMORY;
    load(scratch, gamma, 0, 1, num_gamma, is_bf16);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *x = scratch + num_gamma + 2 * thread * group, *factor = x + group;
        int64_t groups = width / group, num_parts = num_rows * groups;
        for (int64_t part = thread * num_parts / threads; part < (thread + 1) * num_parts / threads; part++) {
            int64_t n = part / groups, start = part % groups * group;
            const float *weights = scratch + (num_gamma == group ? 0 : start);
            load(x, input->data, n * input->row + start * input->column, input->column, group, is_bf16);
            load(factor, gate->data, n * gate->row + start * gate->column, gate->column, group, is_bf16);
            activate(factor, group, SILU);
            if (gates_first) for (int64_t i = 0; i < group; i++) x[i] *= factor[i];
            float squares = 0.0f;
            for (int64_t i = 0; i < group; i++) squares += x[i] * x[i];
            float rstd = 1.0f / sqrtf(squares / group + (float)eps);
            for (int64_t i = 0; i < group; i++) x[i] = round_to(round_to(x[i] * rstd, is_bf16) * weights[i], is_bf16);
            if (!gates_first) for (int64_t i = 0; i < group; i++) x[i] *= factor[i];
            store(output, n * width + start, 1, x, group, is_bf16);
        }
    }
    free(scratch);
    return 0;
}

static int has_nan(const float *x, int64_t count) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found |= x[i] != x[i];
    return found;
}

enum { SUMMED = 128 };  /* values of a block, whose sum is a float; the blocks' total is a double */

/* The sum of exp(scale (x - top)); `totals`, unless NULL, gets the running total after each block. */
static double sum_of_exp(const float *x, int64_t width, float top, float scale, double *totals) {
    double total = 0.0;
    for (int64_t start = 0; start < width; start += SUMMED) {
        int64_t count = width - start < SUMMED ? width - start : SUMMED;
        float sum = 0.0f;
        for (int64_t i = 0; i < count; i++) sum += fast_exp((x[start + i] - top) * scale);
        total += sum;
        if (totals) totals[start / SUMMED] = total;
    }
    return total;
}

/* log of `sum`, which is of exp(scale (x - top)), with `top` added again. */
static float log_of_sum(const float *x, int64_t width, float top, float scale, double sum) {
    if (isinf(top)) return has_nan(x, width) ? NAN : top;
    return top * scale + (float)log(sum);
}

/* logsumexp(scale x) of each row. */
int log_sum_exp(const float *values, int64_t row, float *output, int64_t num_rows, int64_t width, double scale,
                int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < num_rows; n++) {
        const float *x = values + n * row;
        float top = largest(x, width);
        output[n] = log_of_sum(x, width, top, scale, sum_of_exp(x, width, top, scale, NULL));
    }
    return 0;
}

/* The first index at which the running sum of exp(x - top) exceeds `share` of the last of `totals`, the running totals
   of its blocks. Where rounding keeps all sums below it, the last index with a weight; without finite sums the last. */
static int64_t first_above(const float *x, int64_t width, float top, const double *totals, double share) {
    int64_t num_blocks = (width + SUMMED - 1) / SUMMED, block = 0;
    double target = share * totals[num_blocks - 1];
    if (!(target < totals[num_blocks - 1])) target = nextafter(totals[num_blocks - 1], 0.0);
    while (block + 1 < num_blocks && !(totals[block] > target)) block++;
    int64_t start = block * SUMMED, count = width - start < SUMMED ? width - start : SUMMED, chosen = -1;
    double sum = block ? totals[block - 1] : 0.0;
    float weights[SUMMED];
    for (int64_t i = 0; i < count; i++) weights[i] = fast_exp(x[start + i] - top);
    for (int64_t i = 0; i < count; i++) {
        sum += weights[i];
        if (weights[i] > 0.0f) chosen = start + i;
        if (sum > target) break;
    }
    return chosen < 0 ? width - 1 : chosen;
}

/* An index of each row, drawn with weights exp(x) by a share in [0, 1) of their sum, and logsumexp(x). */
int draw_rows(const float *values, int64_t row, const float *shares, int64_t *tokens, float *sums, int64_t num_rows,
              int64_t width, int64_t threads) {
    int64_t num_blocks = (width + SUMMED - 1) / SUMMED;
    double *scratch = malloc(num_rows * num_blocks * sizeof(double));
    if (!scratch) return NO_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < num_rows; n++) {
        const float *x = values + n * row;
        double *totals = scratch + n * num_blocks;
        float top = largest(x, width);
        sums[n] = log_of_sum(x, width, top, 1.0f, sum_of_exp(x, width, top, 1.0f, totals));
        tokens[n] = first_above(x, width, top, totals, shares[n]);
    }
    free(scratch);
    return 0;
}

/* Each row becomes factor exp(x - shift) in place, factor 1 where there is none; sums [num_rows] of the row. */
int exp_rows(float *values, int64_t row, const float *shift, const float *factor, float *sums, int64_t num_rows,
             int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < num_rows; n++) {
        float *x = values + n * row, times = factor ? factor[n] : 1.0f, sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += x[i] = times * fast_exp(x[i] - shift[n]);
        sums[n] = sum;
    }
    return 0;
}

/* The index of the largest of each row, the first of equal ones; of the first NaN where there is one. */
int first_largest(const float *values, int64_t row, int64_t *output, int64_t num_rows, int64_t width,
                  int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < num_rows; n++) {
        const float *x = values + n * row;
        float top = has_nan(x, width) ? NAN : largest(x, width);
        int64_t i = 0;
        for (int is_found = 0; i + SUMMED <= width; i += SUMMED) {
            for (int64_t j = i; j < i + SUMMED; j++) is_found |= x[j] == top || x[j] != x[j];
            if (is_found) break;
        }
        while (i + 1 < width && x[i] != top && x[i] == x[i]) i++;
        output[n] = i;
    }
    return 0;
}
