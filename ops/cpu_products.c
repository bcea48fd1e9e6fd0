/* Products of a few rows with weights that lie as [out, in], on a CPU; ops/cpu_kernels.py calls them.

Weights are read as they lie, in one of these ways:

    FP32     as they are
    WIDENED  bf16; the weights of a block are widened to fp32 once for all rows, into a scratch that the first cache holds
    PAIRS    bf16; two values that are neighbors along the inputs are one unit of 32 bits, and a unit of the weight times
             a vector of units, one for each row, adds both products (AVX-512 BF16): the loops are those of FP32 with
             half as many steps
    FEW, FEW_WIDENED  fp32 or bf16; sums of 4 rows at once run along the inputs in whole vectors, at the speed of reading
             the weights

N rows. */

#include "cpu_values.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
enum { HAS_PAIRS = 1 };
#else
enum { HAS_PAIRS = 0 };
#endif

enum { FP32, WIDENED, PAIRS, FEW, FEW_WIDENED };
enum { MOST_FEW = 4 };  /* rows at once, and outputs */
/* Of more rows whose values are packed, as many are multiplied by all weights before the next: the second cache holds
   them. */
enum { CHUNK_ROWS = 128 };

static int is_bf16(int kind) { return kind == WIDENED || kind == PAIRS || kind == FEW_WIDENED; }
static int is_few(int kind) { return kind == FEW || kind == FEW_WIDENED; }

/* Of a product a block of OUTPUTS times 2 LANES rows stays in registers, beside two vectors of inputs and a weight. Of
   the 12 outputs for which AVX-512 has the registers 8 are faster: their weights, often 4 KiB apart, keep their places
   in the cache (0.9 of the time for 1024 inputs, two Zen 5 cores). */
#if defined(__AVX512F__)
enum { OUTPUTS = 8 };
#elif defined(__AVX2__)
enum { OUTPUTS = 6 };
#elif defined(__ARM_NEON)
enum { OUTPUTS = 12 };
#else
enum { OUTPUTS = 6 };
#endif
enum { LINE = 64 };  /* bytes of a cache line */

typedef struct {  /* rows of the weight lie as [out, in] */
    const float *weight;
    const void *bias;  /* [out], or NULL */
    int64_t row;       /* in units: values, or PAIRS of them */
} Linear;

/* What the products read, by columns: the rows' units for input k in whole vectors at `data + k * stride`, those of the
   last `num_last` of `depth` inputs at `last` instead, `last_stride` apart. Behind the rows of a column lies anything. */
typedef struct {
    const float *data, *last;
    int64_t stride, last_stride, num_last, depth;
} Columns;

typedef struct {  /* output = linear + residual, act(linear), or act(gate) * linear, each of [N, width] */
    Linear linear, gate;  /* gate.weight NULL: none */
    int64_t activation;   /* -1: none */
    const void *residual;
    int64_t residual_row, residual_column;
    void *output;
    int64_t row, column, width;
    int64_t is_widened;   /* bf16 results are stored as fp32 */
} Product;

/* sum + w x of a unit of the weight and a vector of units. */
static inline __attribute__((always_inline)) Vector add_product(Vector sum, const float *w, Vector x, int kind) {
#if defined(__AVX512BF16__)
    if (kind == PAIRS) {
        int32_t pair;
        memcpy(&pair, w, 4);
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)x, (__m512bh)_mm512_set1_epi32(pair));
    }
#endif
    return sum + (*w - (Vector){0}) * x;
}

/* sums[o] += weight[o][k] times the vectors of inputs, for one k. */
static inline __attribute__((always_inline)) void add_products(Vector sums[OUTPUTS][2], const float *weight,
                                                               int64_t weight_row, const float *inputs, int outputs,
                                                               int vectors, int kind) {
    Vector x[2];
    for (int v = 0; v < vectors; v++) x[v] = *(const Vector *)(inputs + v * LANES);
#pragma GCC unroll 12
    for (int o = 0; o < outputs; o++)
        for (int v = 0; v < vectors; v++)
            sums[o][v] = add_product(sums[o][v], weight + o * weight_row, x[v], kind);
}

/* sums [outputs][2 LANES] of one block; outputs, vectors and kind are constants. `ahead` is as large as the block's
   weights, and is asked for meanwhile. */
static inline __attribute__((always_inline)) void multiply_kind(const Linear *linear, const Columns *inputs, int64_t row,
                                                                int outputs, int vectors, const char *ahead,
                                                                float *block, int kind) {
    Vector sums[OUTPUTS][2] = {{{0}}};
    const float *weight = linear->weight, *data = inputs->data + row, *last = inputs->last + row;
    int64_t stride = inputs->stride, num_first = inputs->depth - inputs->num_last, k = 0;
    int step_bytes = outputs * 4 * (kind == WIDENED ? 2 : 4);
    for (; k + 4 <= num_first; k += 4) {
        if (ahead) for (int i = 0; i < step_bytes; i += LINE) __builtin_prefetch(ahead + k / 4 * step_bytes + i);
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++)
            add_products(sums, weight + k + step, linear->row, data + (k + step) * stride, outputs, vectors, kind);
    }
    for (; k < num_first; k++) add_products(sums, weight + k, linear->row, data + k * stride, outputs, vectors, kind);
    for (; k < inputs->depth; k++, last += inputs->last_stride)
        add_products(sums, weight + k, linear->row, last, outputs, vectors, kind);
    for (int o = 0; o < outputs; o++)
        for (int v = 0; v < vectors; v++) *(Vector *)(block + (o * 2 + v) * LANES) = sums[o][v];
}

static inline __attribute__((always_inline)) void multiply_block(const Linear *linear, const Columns *inputs, int64_t row,
                                                                 int outputs, int vectors, const char *ahead,
                                                                 float *block, int kind) {
    if (kind == PAIRS) multiply_kind(linear, inputs, row, outputs, vectors, ahead, block, PAIRS);
    else if (kind == WIDENED) multiply_kind(linear, inputs, row, outputs, vectors, ahead, block, WIDENED);
    else multiply_kind(linear, inputs, row, outputs, vectors, ahead, block, FP32);
}

/* block [outputs][2 LANES] = the products of `rows` dense rows of fp32; outputs, rows and is_wide are constants. */
static inline __attribute__((always_inline)) void multiply_few_of(const void *weight, int64_t weight_row,
                                                                  const float *inputs, int64_t depth, int outputs,
                                                                  int rows, int is_widened, float *block) {
    Vector sums[MOST_FEW * MOST_FEW] = {{0}};  /* [rows][outputs], then anything */
    int64_t whole = depth / LANES * LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
#pragma GCC unroll 12
        for (int o = 0; o < outputs; o++) {
            int64_t place = o * weight_row + k, next = place + outputs * weight_row;  /* of the next outputs */
            Vector w = vector_at(weight, place, is_widened);
            __builtin_prefetch((const char *)weight + next * (is_widened ? 2 : 4));
            for (int n = 0; n < rows; n++) sums[n * outputs + o] += w * *(const Vector *)(inputs + n * depth + k);
        }
    }
    float wholes[MOST_FEW * MOST_FEW];
    for (int i = 0; i < outputs * rows; i += LANES) *(Vector *)(wholes + i) = sum_of_each(sums + i);
    for (int o = 0; o < outputs; o++)
        for (int n = 0; n < rows; n++) {
            float sum = wholes[n * outputs + o];
            for (int64_t k = whole; k < depth; k++)
                sum += value(weight, o * weight_row + k, is_widened) * inputs[n * depth + k];
            block[o * 2 * LANES + n] = sum;
        }
}

static inline __attribute__((always_inline)) void multiply_few(const void *weight, int64_t row, const float *inputs,
                                                               int64_t depth, int outputs, int64_t num_rows,
                                                               int is_widened, float *block) {
    int64_t bytes = (is_widened ? 2 : 4) * row;
    for (int64_t n = 0; n < num_rows; n += MOST_FEW)
        for (int o = 0; o < outputs; o += o + MOST_FEW <= outputs ? MOST_FEW : 1) {
            const char *w = (const char *)weight + o * bytes;
            int64_t rows = num_rows - n < MOST_FEW ? num_rows - n : MOST_FEW;
            const float *x = inputs + n * depth;
            float *sums = block + o * 2 * LANES + n;
            if (o + MOST_FEW > outputs)
                for (int64_t i = 0; i < rows; i++) multiply_few_of(w, row, x + i * depth, depth, 1, 1, is_widened, sums + i);
            else if (rows == 1) multiply_few_of(w, row, x, depth, MOST_FEW, 1, is_widened, sums);
            else if (rows == 2) multiply_few_of(w, row, x, depth, MOST_FEW, 2, is_widened, sums);
            else if (rows == 3) multiply_few_of(w, row, x, depth, MOST_FEW, 3, is_widened, sums);
            else multiply_few_of(w, row, x, depth, MOST_FEW, MOST_FEW, is_widened, sums);
        }
}

/* The linear from one output on, whose weight is widened into `scratch` [outputs][depth] where its kind asks for it. */
static Linear block_of(const Linear *linear, int64_t output, int outputs, int64_t depth, int kind, float *scratch) {
    Linear block = *linear;
    if (linear->bias) block.bias = (const char *)linear->bias + output * (is_bf16(kind) ? 2 : 4);
    if (kind == WIDENED) {
        for (int o = 0; o < outputs; o++) load(scratch + o * depth, linear->weight, (output + o) * linear->row, 1, depth, 1);
        block.weight = scratch, block.row = depth;
    } else if (kind == FEW_WIDENED) block.weight = (const float *)((const bf16 *)linear->weight + output * linear->row);
    else block.weight += output * linear->row;
    return block;
}

/* block [outputs][2 LANES] = the sums of a linear, bias included, for `rows` rows from row `first` on. */
static void multiply_linear(const Linear *linear, int outputs, const Columns *inputs, int64_t first, int64_t rows,
                            const char *ahead, float *block, int kind) {
    if (kind == FEW) multiply_few(linear->weight, linear->row, inputs->data, inputs->depth, outputs, rows, 0, block);
    else if (kind == FEW_WIDENED)
        multiply_few(linear->weight, linear->row, inputs->data, inputs->depth, outputs, rows, 1, block);
    else if (outputs < OUTPUTS)
        for (int o = 0; o < outputs; o++) {
            Linear one = {linear->weight + o * linear->row, NULL, linear->row};
            for (int64_t n = 0; n < rows; n += LANES)
                multiply_block(&one, inputs, first + n, 1, 1, NULL, block + o * 2 * LANES + n, kind);
        }
    else if (rows <= LANES) multiply_block(linear, inputs, first, OUTPUTS, 1, ahead, block, kind);
    else multiply_block(linear, inputs, first, OUTPUTS, 2, ahead, block, kind);
    int rounds = is_bf16(kind);
    for (int o = 0; o < outputs && (linear->bias || rounds); o++) {
        float bias = linear->bias ? value(linear->bias, o, rounds) : 0.0f;
        for (int64_t n = 0; n < rows; n++) block[o * 2 * LANES + n] = round_to(block[o * 2 * LANES + n] + bias, rounds);
    }
}

/* Stores a block [outputs][2 LANES] in rows whose values are neighbors, all outputs of a row at once: rows of a vocabulary
   are so far apart that each store is a miss. */
static void store_dense(float *output, int64_t row, const float *block, int outputs, int64_t rows) {
    float turned[2 * LANES][OUTPUTS];
    for (int n = 0; n < 2 * LANES; n++)
        for (int o = 0; o < OUTPUTS; o++) turned[n][o] = block[o * 2 * LANES + n];
    if (outputs == OUTPUTS) for (int64_t n = 0; n < rows; n++) memcpy(output + n * row, turned[n], OUTPUTS * 4);
    else for (int64_t n = 0; n < rows; n++) memcpy(output + n * row, turned[n], outputs * 4);
}

static void store_dense_bf16(bf16 *output, int64_t row, const float *block, int outputs, int64_t rows) {
    bf16 turned[2 * LANES][OUTPUTS];
    for (int n = 0; n < 2 * LANES; n++)
        for (int o = 0; o < OUTPUTS; o++) turned[n][o] = narrow(block[o * 2 * LANES + n]);
    if (outputs == OUTPUTS) for (int64_t n = 0; n < rows; n++) memcpy(output + n * row, turned[n], OUTPUTS * 2);
    else for (int64_t n = 0; n < rows; n++) memcpy(output + n * row, turned[n], outputs * 2);
}

/* The weights behind those of a block, to be asked for: they lie there where rows of the weight are neighbors. NULL if
   there is no such block. */
static const char *behind(const Linear *linear, int64_t output, int64_t width, int64_t depth, int kind) {
    if (is_few(kind) || linear->row != depth || output + 2 * OUTPUTS > width) return NULL;
    return (const char *)linear->weight + (output + OUTPUTS) * depth * (kind == WIDENED ? 2 : 4);
}

/* One block of outputs for `num_rows` rows from row `begin` on. Values are rounded to bf16 wherever torch's operators
   would round. scratch [2 OUTPUTS][depth]. */
static void multiply_rows(const Product *p, int64_t output, const Columns *inputs, int64_t begin, int64_t num_rows,
                          int kind, float *scratch) {
    int outputs = p->width - output < OUTPUTS ? p->width - output : OUTPUTS, rounds = is_bf16(kind);
    float block[OUTPUTS * 2 * LANES], gates[OUTPUTS * 2 * LANES];
    Linear linear = block_of(&p->linear, output, outputs, inputs->depth, kind, scratch), gate = {NULL, NULL, 0};
    if (p->gate.weight)
        gate = block_of(&p->gate, output, outputs, inputs->depth, kind, scratch + OUTPUTS * inputs->depth);
    for (int64_t first = 0; first < num_rows; first += 2 * LANES) {
        int64_t rows = num_rows - first < 2 * LANES ? num_rows - first : 2 * LANES;
        const char *ahead = first ? NULL : behind(&p->linear, output, p->width, inputs->depth, kind);
        multiply_linear(&linear, outputs, inputs, first, rows, ahead, block, kind);
        ahead = first ? NULL : behind(&p->gate, output, p->width, inputs->depth, kind);
        if (gate.weight) multiply_linear(&gate, outputs, inputs, first, rows, ahead, gates, kind);
        for (int o = 0; o < outputs; o++) {
            float *sums = block + o * 2 * LANES, *factors = gates + o * 2 * LANES;
            if (p->activation >= 0) activate(gate.weight ? factors : sums, rows, p->activation);
            if (gate.weight) for (int64_t n = 0; n < rows; n++) sums[n] *= round_to(factors[n], rounds);
            if (p->residual) {
                int64_t added = (begin + first) * p->residual_row + (output + o) * p->residual_column;
                for (int64_t n = 0; n < rows; n++) sums[n] += value(p->residual, added + n * p->residual_row, rounds);
            }
        }
        int64_t start = (begin + first) * p->row + output * p->column;
        int is_narrow = rounds && !p->is_widened;
        if (p->column == 1 && is_narrow) store_dense_bf16((bf16 *)p->output + start, p->row, block, outputs, rows);
        else if (p->column == 1 && p->row > 1) store_dense((float *)p->output + start, p->row, block, outputs, rows);
        else
            for (int o = 0; o < outputs; o++)
                store(p->output, start + o * p->column, p->row, block + o * 2 * LANES, rows, is_narrow);
    }
}

/* Whether `products` takes PAIRS. */
int has_pairs(void) { return HAS_PAIRS; }

/* Products of the same rows with several weights. A sum runs along the inputs in order, whatever the number of rows and
   threads. `input`, `depth` and the rows of weights count units of their kind. */
int products(const Matrix *input, const Product *all, int64_t count, int64_t num_rows, int64_t depth, int64_t kind,
             int64_t threads) {
    int few = is_few(kind), is_widened = kind == WIDENED || kind == FEW_WIDENED;
    /* Where rows lie by columns, a last vector goes on into the next column; the last columns' would leave the memory. */
    int64_t in_vectors = (num_rows + LANES - 1) / LANES * LANES, num_last = depth, num_blocks = 0;
    if (!is_widened && !few && (input->row == 1 || num_rows == 1))
        num_last = (in_vectors - num_rows + input->column - 1) / input->column;
    if (num_last > depth) num_last = depth;
    int64_t chunk = num_last == depth && num_rows > CHUNK_ROWS ? CHUNK_ROWS : num_rows;
    if (chunk < num_rows) in_vectors = CHUNK_ROWS;
    int64_t scratch_size = kind == WIDENED ? 2 * OUTPUTS * depth : 0;  /* of a thread */
    float *last = calloc(num_last * in_vectors + threads * scratch_size + 1, sizeof(float));
    if (!last) return NO_MEMORY;
    float *scratch = last + num_last * in_vectors;
    Columns inputs = {input->data, last, input->column, in_vectors, num_last, depth};
    if (num_last == depth) inputs = (Columns){last, last, in_vectors, in_vectors, 0, depth};
    for (int64_t i = 0; i < count; i++) num_blocks += (all[i].width + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < num_rows; begin += chunk) {
        int64_t rows = num_rows - begin < chunk ? num_rows - begin : chunk, start = begin * input->row;
        if (few) {
#pragma omp for schedule(static)
            for (int64_t n = 0; n < rows; n++)
                load(last + n * depth, input->data, start + n * input->row, input->column, depth, is_widened);
        } else if (num_last) {
#pragma omp for schedule(static)
            for (int64_t k = 0; k < num_last; k++)
                load(last + k * in_vectors, input->data, start + (depth - num_last + k) * input->column, input->row, rows,
                     is_widened);
        }
#pragma omp for schedule(static)
        for (int64_t b = 0; b < num_blocks; b++) {
            const Product *p = all;
            int64_t block = b;
            for (; block >= (p->width + OUTPUTS - 1) / OUTPUTS; p++) block -= (p->width + OUTPUTS - 1) / OUTPUTS;
            multiply_rows(p, block * OUTPUTS, &inputs, begin, rows, kind, scratch + omp_get_thread_num() * scratch_size);
        }
    }
    free(last);
    return 0;
}
