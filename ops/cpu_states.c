/* The recurrences of layers that keep a state per sequence, on a CPU; ops/cpu_states.py calls them.

A prefill takes token after token by the functions of a decode step, so a token's output and the state after it have the
same bits however its sequence is cut and whatever other sequences there are. That costs no more operations than chunks
of products do, because a part of a state stays in the first cache for some tokens.

N packed tokens, R sequences, C channels, W width of a convolution. */

#include "cpu_values.h"

typedef struct {  /* [num_slots, ...], dense slots, and the sequences whose states are there */
    void *data;
    int64_t slot;            /* from one to the next */
    const int64_t *slots;    /* [R] */
    int64_t num_slots;
    const int32_t *starts;   /* [R + 1], of each sequence's tokens; NULL: one token each */
    const uint8_t *anew;     /* [R], whether a state is zero before them; NULL: none is */
    int64_t num_sequences;
} States;

typedef struct {
    int64_t start, count;  /* tokens */
    int is_anew;
    int64_t place;         /* of its state */
} Run;

static int has_slots(const States *states) {
    for (int64_t r = 0; r < states->num_sequences; r++)
        if (states->slots[r] < 0 || states->slots[r] >= states->num_slots) return 0;
    return 1;
}

static Run run_of(const States *states, int64_t r) {
    int64_t start = states->starts ? states->starts[r] : r, end = states->starts ? states->starts[r + 1] : r + 1;
    return (Run){start, end - start, states->anew && states->anew[r], states->slots[r] * states->slot};
}

/* Parts that a thread takes at once: a share of all where each has one token, else one, for sequences differ in length. */
static int64_t parts_at_once(const States *states, int64_t num_parts, int64_t threads) {
    return states->starts ? 1 : (num_parts + threads - 1) / threads;
}

enum { CHANNELS = 128, MOST_WIDTH = 16 };

/* A depthwise convolution's output [N, C], dense, of each sequence's inputs after the W - 1 inputs of its state, which
   moves on; the weight is [C, W], dense, the states [num_slots, W - 1, C]. Kind -1: no activation. */
int short_conv(const Matrix *input, const void *weight, const void *bias, const States *states, void *output,
               int64_t num_channels, int64_t width, int64_t kind, int64_t is_bf16, int64_t threads) {
    if (!has_slots(states)) return BAD_PLACE;
    int64_t kept = width - 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < num_channels; start += CHANNELS) {
        int64_t count = num_channels - start < CHANNELS ? num_channels - start : CHANNELS;
        float weights[MOST_WIDTH][CHANNELS], shift[CHANNELS] = {0}, inputs[MOST_WIDTH][CHANNELS], sum[CHANNELS];
        for (int64_t j = 0; j < width; j++) load(weights[j], weight, start * width + j, width, count, is_bf16);
        if (bias) load(shift, bias, start, 1, count, is_bf16);
        for (int64_t r = 0; r < states->num_sequences; r++) {
            Run run = run_of(states, r);
            /* The input of token t lies in row (t + kept) % width; the state has those of t = -kept to -1. */
            for (int64_t j = 0; j < kept; j++)
                if (run.is_anew) memset(inputs[j], 0, count * sizeof(float));
                else load(inputs[j], states->data, run.place + j * num_channels + start, 1, count, is_bf16);
            for (int64_t t = 0; t < run.count; t++) {
                int64_t n = run.start + t;
                load(inputs[(t + kept) % width], input->data, n * input->row + start * input->column, input->column,
                     count, is_bf16);
                for (int64_t c = 0; c < count; c++) sum[c] = shift[c];
                for (int64_t j = 0; j < width; j++) {
                    const float *x = inputs[(t + j) % width];
                    for (int64_t c = 0; c < count; c++) sum[c] += x[c] * weights[j][c];
                }
                for (int64_t c = 0; c < count; c++) sum[c] = round_to(sum[c], is_bf16);
                if (kind >= 0) activate(sum, count, kind);
                store(output, n * num_channels + start, 1, sum, count, is_bf16);
            }
            for (int64_t j = 0; j < kept; j++)
                store(states->data, run.place + j * num_channels + start, 1, inputs[(run.count + j) % width], count,
                      is_bf16);
        }
    }
    return 0;
}

static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

enum { TOKENS = 8 };  /* at once, of which a part of the state stays in the first cache beside their vectors */

typedef struct {  /* of a gated delta rule, the same in every step */
    int64_t num_key_heads, num_values;  /* value heads of a key head */
    int64_t key_dim, value_dim;
    double beta_scale;
} Delta;

enum { MOST_KEY_DIM = 512, DELTA_VECTORS = LANES == 16 ? 8 : 4 };

typedef struct {  /* one token of one value head */
    float q[MOST_KEY_DIM], k[MOST_KEY_DIM];  /* normed */
    float decay, beta, product;              /* product: q . k */
    float *values, *output;                  /* [Dv] */
} DeltaToken;

/* Some vectors of the value dimensions: reads the state [Dk, Dv] once for S^T k and S^T q, then moves it on. */
static inline __attribute__((always_inline)) void delta_part(float *state, int64_t key_dim, int64_t value_dim,
                                                             const DeltaToken *t, int64_t begin, int vectors) {
    Vector known[DELTA_VECTORS] = {{0}}, read[DELTA_VECTORS] = {{0}};
    state += begin;
    for (int64_t i = 0; i < key_dim; i++)
        for (int v = 0; v < vectors; v++) {
            Vector s = vector_at(state, i * value_dim + v * LANES, 0);
            known[v] += t->k[i] * s;
            read[v] += t->q[i] * s;
        }
    for (int v = 0; v < vectors; v++) {
        known[v] = t->beta * (vector_at(t->values, begin + v * LANES, 0) - t->decay * known[v]);
        *(Vector *)(t->output + begin + v * LANES) = t->decay * read[v] + t->product * known[v];
    }
    for (int64_t i = 0; i < key_dim; i++)
        for (int v = 0; v < vectors; v++) {
            Vector *s = (Vector *)(state + i * value_dim + v * LANES);
            *s = t->decay * *s + t->k[i] * known[v];
        }
}

/* The same for one value dimension. */
static void delta_column(float *state, int64_t key_dim, int64_t value_dim, const DeltaToken *t, int64_t column) {
    float known = 0.0f, read = 0.0f;
    state += column;
    for (int64_t i = 0; i < key_dim; i++) {
        known += t->k[i] * state[i * value_dim];
        read += t->q[i] * state[i * value_dim];
    }
    float delta = t->beta * (t->values[column] - t->decay * known);
    t->output[column] = t->decay * read + t->product * delta;
    for (int64_t i = 0; i < key_dim; i++) state[i * value_dim] = t->decay * state[i * value_dim] + t->k[i] * delta;
}

/* Up to TOKENS tokens of one sequence and one value head; part after part of the value dimensions. */
static void delta_tokens(float *state, int64_t key_dim, int64_t value_dim, const DeltaToken *tokens, int64_t count) {
    int64_t v = 0;
    for (; value_dim - v >= DELTA_VECTORS * LANES; v += DELTA_VECTORS * LANES)
        for (int64_t t = 0; t < count; t++) delta_part(state, key_dim, value_dim, tokens + t, v, DELTA_VECTORS);
    for (; value_dim - v >= LANES; v += LANES)
        for (int64_t t = 0; t < count; t++) delta_part(state, key_dim, value_dim, tokens + t, v, 1);
    for (; v < value_dim; v++)
        for (int64_t t = 0; t < count; t++) delta_column(state, key_dim, value_dim, tokens + t, v);
}

/* x becomes scale x / sqrt(sum x^2 + 1e-6). */
static void l2_norm(float *x, int64_t count, float scale) {
    float squares = 0.0f;
    for (int64_t i = 0; i < count; i++) squares += x[i] * x[i];
    float factor = scale / sqrtf(squares + 1e-6f);
    for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

typedef struct {  /* rows [queries | keys | values], and what decay and beta are made of, for each value head */
    const Matrix *mixed, *a, *b;
    const float *a_log, *dt_bias;  /* NULL: a is the logarithm of the decay in fp32, b is beta */
} DeltaRows;

static void load_delta(DeltaToken *token, const DeltaRows *rows, const Delta *delta, int64_t n, int64_t v, int is_bf16) {
    const Matrix *mixed = rows->mixed, *a = rows->a, *b = rows->b;
    int64_t heads = delta->num_key_heads, key_dim = delta->key_dim, dim = delta->value_dim, column = mixed->column;
    int64_t row = n * mixed->row, h = v / delta->num_values;
    load(token->q, mixed->data, row + h * key_dim * column, column, key_dim, is_bf16);
    load(token->k, mixed->data, row + (heads + h) * key_dim * column, column, key_dim, is_bf16);
    load(token->values, mixed->data, row + (2 * heads * key_dim + v * dim) * column, column, dim, is_bf16);
    l2_norm(token->q, key_dim, 1.0f / sqrtf(key_dim));
    l2_norm(token->k, key_dim, 1.0f);
    token->product = 0.0f;
    for (int64_t i = 0; i < key_dim; i++) token->product += token->q[i] * token->k[i];
    float step = value(a->data, n * a->row + v * a->column, is_bf16 && rows->a_log);
    token->beta = value(b->data, n * b->row + v * b->column, is_bf16);
    if (rows->a_log) {
        step = -expf(rows->a_log[v]) * softplus(step + rows->dt_bias[v]);
        token->beta = round_to(sigmoid(token->beta), is_bf16) * delta->beta_scale;
    }
    token->decay = expf(step);
}

/* output [N, V Dv], dense, of rows [queries | keys | values]; states [num_slots, V, Dk, Dv], which move on. */
int delta_rule(const Matrix *mixed, const Matrix *a, const Matrix *b, const float *a_log, const float *dt_bias,
               const States *states, const Delta *delta, void *output, int64_t is_bf16, int64_t threads) {
    if (!has_slots(states)) return BAD_PLACE;
    int64_t heads = delta->num_key_heads * delta->num_values, dim = delta->value_dim, size = delta->key_dim * dim;
    int64_t num_parts = states->num_sequences * heads, needed = TOKENS * (sizeof(DeltaToken) + 2 * dim * sizeof(float));
    DeltaRows rows = {mixed, a, b, a_log, dt_bias};
    char *memory = malloc(threads * needed);
    if (!memory) return NO_MEMORY;
#pragma omp parallel num_threads(threads)
    {
        DeltaToken *tokens = (DeltaToken *)(memory + omp_get_thread_num() * needed);
        for (int64_t t = 0; t < TOKENS; t++) {
            tokens[t].values = (float *)(tokens + TOKENS) + 2 * t * dim;
            tokens[t].output = tokens[t].values + dim;
        }
#pragma omp for schedule(dynamic, parts_at_once(states, num_parts, threads))
        for (int64_t part = 0; part < num_parts; part++) {
            int64_t v = part % heads;
            Run run = run_of(states, part / heads);
            float *state = (float *)states->data + run.place + v * size;
            if (run.is_anew) memset(state, 0, size * sizeof(float));
            for (int64_t first = 0; first < run.count; first += TOKENS) {
                int64_t count = run.count - first < TOKENS ? run.count - first : TOKENS, n = run.start + first;
                for (int64_t t = 0; t < count; t++) load_delta(tokens + t, &rows, delta, n + t, v, is_bf16);
                delta_tokens(state, delta->key_dim, dim, tokens, count);
                for (int64_t t = 0; t < count; t++)
                    store(output, ((n + t) * heads + v) * dim, 1, tokens[t].output, dim, is_bf16);
            }
        }
    }
    free(memory);
    return 0;
}

typedef struct {  /* of a state space, the same in every step */
    int64_t num_heads, num_groups, head_dim, state_size;
    double least, most;  /* of the time step */
} Space;

enum { MOST_STATE_SIZE = 512, SPACE_VECTORS = 4 };

typedef struct {  /* one token of one head */
    float b[MOST_STATE_SIZE], c[MOST_STATE_SIZE];
    float decay, step;
    float *x, *output;  /* [P] */
} SpaceToken;

/* Some vectors of `rows` rows of a state [P, S]: they move on, and sums[p] gets what C reads of row p. */
static inline __attribute__((always_inline)) void space_part(float *state, int64_t state_size, const SpaceToken *t,
                                                             int64_t first, int64_t rows, int64_t begin, int vectors,
                                                             Vector *sums) {
    Vector b[SPACE_VECTORS], c[SPACE_VECTORS];
    for (int v = 0; v < vectors; v++) {
        b[v] = vector_at(t->b, begin + v * LANES, 0);
        c[v] = vector_at(t->c, begin + v * LANES, 0);
    }
    for (int64_t p = 0; p < rows; p++) {
        Vector sum = sums[p];
        float x = t->x[first + p] * t->step;
        for (int v = 0; v < vectors; v++) {
            Vector *s = (Vector *)(state + (first + p) * state_size + begin + v * LANES);
            *s = t->decay * *s + x * b[v];
            sum += *s * c[v];
        }
        sums[p] = sum;
    }
}

/* Up to LANES rows of a state: output = S C. */
static void space_rows(float *state, int64_t state_size, const SpaceToken *t, int64_t first, int64_t rows) {
    Vector sums[LANES] = {{0}};
    int64_t begin = 0;
    for (; state_size - begin >= SPACE_VECTORS * LANES; begin += SPACE_VECTORS * LANES)
        space_part(state, state_size, t, first, rows, begin, SPACE_VECTORS, sums);
    for (; state_size - begin >= LANES; begin += LANES)
        space_part(state, state_size, t, first, rows, begin, 1, sums);
    Vector read = sum_of_each(sums);
    for (int64_t p = 0; p < rows; p++) {
        float sum = read[p], x = t->x[first + p] * t->step, *row = state + (first + p) * state_size;
        for (int64_t i = begin; i < state_size; i++) {
            row[i] = t->decay * row[i] + x * t->b[i];
            sum += row[i] * t->c[i];
        }
        t->output[first + p] = sum;
    }
}

typedef struct {  /* rows [x | B | C], and what the time step and the output are made of, for each head */
    const Matrix *mixed, *dt;
    const float *a_log, *dt_bias, *skip;
} SpaceRows;

static void load_space(SpaceToken *token, const SpaceRows *rows, const Space *space, int64_t n, int64_t h, int is_bf16) {
    const Matrix *mixed = rows->mixed, *dt = rows->dt;
    int64_t dim = space->head_dim, size = space->state_size, column = mixed->column, row = n * mixed->row;
    int64_t inner = space->num_heads * dim, group = h / (space->num_heads / space->num_groups);
    load(token->x, mixed->data, row + h * dim * column, column, dim, is_bf16);
    load(token->b, mixed->data, row + (inner + group * size) * column, column, size, is_bf16);
    load(token->c, mixed->data, row + (inner + (space->num_groups + group) * size) * column, column, size, is_bf16);
    float step = value(dt->data, n * dt->row + h * dt->column, is_bf16) + round_to(rows->dt_bias[h], is_bf16);
    step = round_to(softplus(round_to(step, is_bf16)), is_bf16);
    step = step < space->least ? space->least : step > space->most ? space->most : step;
    token->step = round_to(step, is_bf16);
    token->decay = expf(-expf(rows->a_log[h]) * token->step);
}

/* output [N, H P], dense, of rows [x | B | C] and time steps [N, H]; states [num_slots, H, P, S], which move on. */
int state_space(const Matrix *mixed, const Matrix *dt, const float *a_log, const float *dt_bias, const float *skip,
                const States *states, const Space *space, void *output, int64_t is_bf16, int64_t threads) {
    if (!has_slots(states)) return BAD_PLACE;
    int64_t heads = space->num_heads, dim = space->head_dim, size = dim * space->state_size;
    int64_t num_parts = states->num_sequences * heads, needed = TOKENS * (sizeof(SpaceToken) + 2 * dim * sizeof(float));
    SpaceRows rows = {mixed, dt, a_log, dt_bias, skip};
    char *memory = malloc(threads * needed);
    if (!memory) return NO_MEMORY;
#pragma omp parallel num_threads(threads)
    {
        SpaceToken *tokens = (SpaceToken *)(memory + omp_get_thread_num() * needed);
        for (int64_t t = 0; t < TOKENS; t++) {
            tokens[t].x = (float *)(tokens + TOKENS) + 2 * t * dim;
            tokens[t].output = tokens[t].x + dim;
        }
#pragma omp for schedule(dynamic, parts_at_once(states, num_parts, threads))
        for (int64_t part = 0; part < num_parts; part++) {
            int64_t h = part % heads;
            Run run = run_of(states, part / heads);
            float *state = (float *)states->data + run.place + h * size;
            if (run.is_anew) memset(state, 0, size * sizeof(float));
            for (int64_t first = 0; first < run.count; first += TOKENS) {
                int64_t count = run.count - first < TOKENS ? run.count - first : TOKENS, n = run.start + first;
                for (int64_t t = 0; t < count; t++) load_space(tokens + t, &rows, space, n + t, h, is_bf16);
                for (int64_t p = 0; p < dim; p += LANES)
                    for (int64_t t = 0; t < count; t++)
                        space_rows(state, space->state_size, tokens + t, p, dim - p < LANES ? dim - p : LANES);
                for (int64_t t = 0; t < count; t++) {
                    float *y = tokens[t].output;
                    for (int64_t p = 0; p < dim; p++) y[p] += skip[h] * tokens[t].x[p];
                    store(output, ((n + t) * heads + h) * dim, 1, y, dim, is_bf16);
                }
            }
        }
    }
    free(memory);
    return 0;
}
