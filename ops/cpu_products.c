/* Products of a few fp32 rows with weights that lie as [out, in], on a CPU; ops/cpu_products.py calls them.

N rows. */

#include "cpu_values.h"

/* Of a product a block of OUTPUTS times 2 LANES rows stays in registers, beside two vectors of inputs and a weight. Of
   the 12 outputs for which AVX-512 has the registers 8 are faster: their weights, often 4 KiB apart, keep their places
   in the cache (0.9 of the time for 1024 inputs, two Zen 5 cores). */
#if defined(__AVX512F__)
enum { LANES = 16, OUTPUTS = 8 };
#elif defined(__AVX2__)
enum { LANES = 8, OUTPUTS = 6 };
#elif defined(__ARM_NEON)
enum { LANES = 4, OUTPUTS = 12 };
#else
enum { LANES = 4, OUTPUTS = 6 };
#endif
enum { LINE = 16 };  /* floats of a cache line */

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef struct {  /* rows of the weight lie as [out, in] */
    const float *weight, *bias;  /* bias [out], or NULL */
    int64_t row;
} Linear;

/* What the products read, by columns: the rows' values for input k in whole vectors at `data + k * stride`, those of the
   last `num_last` of `depth` inputs at `last` instead, `last_stride` apart. Behind the rows of a column lies anything. */
typedef struct {
    const float *data, *last;
    int64_t stride, last_stride, num_last, depth;
} Columns;

typedef struct {  /* output = linear + residual, act(linear), or act(gate) * linear, each of [N, width] */
    Linear linear, gate;  /* gate.weight NULL: none */
    int64_t activation;   /* -1: none */
    const float *residual;
    int64_t residual_row, residual_column;
    float *output;
    int64_t row, column, width;
} Product;

/* sums[o] += weight[o][k] times the vectors of inputs, which `stride` parts, for one k. */
static inline __attribute__((always_inline)) void add_products(Vector sums[OUTPUTS][2], const float *weight,
                                                               int64_t weight_row, const float *inputs, int outputs,
                                                               int vectors) {
    Vector x[2];
    for (int v = 0; v < vectors; v++) x[v] = *(const Vector *)(inputs + v * LANES);
#pragma GCC unroll 12
    for (int o = 0; o < outputs; o++) {
        Vector w = weight[o * weight_row] - (Vector){0};
        for (int v = 0; v < vectors; v++) sums[o][v] += w * x[v];
    }
}

/* sums [outputs][2 LANES] of one block. `ahead` is as large as the block's weights, and is asked for meanwhile. */
static inline __attribute__((always_inline)) void multiply_block(const float *weight, int64_t weight_row,
                                                                 const Columns *inputs, int64_t row, int outputs,
                                                                 int vectors, const float *ahead, float *block) {
    Vector sums[OUTPUTS][2] = {{{0}}};
    const float *data = inputs->data + row, *last = inputs->last + row;
    int64_t stride = inputs->stride, num_first = inputs->depth - inputs->num_last, k = 0;
    for (; k + 4 <= num_first; k += 4) {
        if (ahead)
            for (int i = 0; i < outputs * 4; i += LINE) __builtin_prefetch(ahead + k * outputs + i);
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++)
            add_products(sums, weight + k + step, weight_row, data + (k + step) * stride, outputs, vectors);
    }
    for (; k < num_first; k++) add_products(sums, weight + k, weight_row, data + k * stride, outputs, vectors);
    for (; k < inputs->depth; k++, last += inputs->last_stride)
        add_products(sums, weight + k, weight_row, last, outputs, vectors);
    for (int o = 0; o < outputs; o++)
        for (int v = 0; v < vectors; v++) *(Vector *)(block + (o * 2 + v) * LANES) = sums[o][v];
}

/* block [outputs][2 LANES] = one block of a linear, bias included, for `rows` rows from row `first` on. */
static void multiply_linear(const Linear *linear, int64_t output, int outputs, const Columns *inputs, int64_t first,
                            int64_t rows, int is_next_asked, float *block) {
    const float *weight = linear->weight + output * linear->row;
    /* The next block lies behind this one where rows of the weight are neighbours. */
    const float *ahead = is_next_asked && linear->row == inputs->depth ? weight + OUTPUTS * linear->row : NULL;
    if (outputs < OUTPUTS)
        for (int o = 0; o < outputs; o++)
            for (int64_t n = 0; n < rows; n += LANES)
                multiply_block(weight + o * linear->row, linear->row, inputs, first + n, 1, 1, NULL,
                               block + o * 2 * LANES + n);
    else if (rows <= LANES) multiply_block(weight, linear->row, inputs, first, OUTPUTS, 1, ahead, block);
    else multiply_block(weight, linear->row, inputs, first, OUTPUTS, 2, ahead, block);
    if (linear->bias)
        for (int o = 0; o < outputs; o++)
            for (int64_t n = 0; n < rows; n++) block[o * 2 * LANES + n] += linear->bias[output + o];
}

/* One block of outputs for all rows. */
static void multiply_rows(const Product *p, int64_t output, const Columns *inputs, int64_t num_rows) {
    int outputs = p->width - output < OUTPUTS ? p->width - output : OUTPUTS;
    float block[OUTPUTS * 2 * LANES], gates[OUTPUTS * 2 * LANES];
    for (int64_t first = 0; first < num_rows; first += 2 * LANES) {
        int64_t rows = num_rows - first < 2 * LANES ? num_rows - first : 2 * LANES;
        int is_next_asked = first == 0 && output + 2 * OUTPUTS <= p->width;
        multiply_linear(&p->linear, output, outputs, inputs, first, rows, is_next_asked, block);
        if (p->gate.weight)
            multiply_linear(&p->gate, output, outputs, inputs, first, rows, is_next_asked, gates);
        for (int o = 0; o < outputs; o++) {
            float *sums = block + o * 2 * LANES, *gate = gates + o * 2 * LANES;
            if (p->activation >= 0) activate(p->gate.weight ? gate : sums, rows, p->activation);
            if (p->gate.weight) for (int64_t n = 0; n < rows; n++) sums[n] *= gate[n];
            if (p->residual) {
                const float *added = p->residual + first * p->residual_row + (output + o) * p->residual_column;
                for (int64_t n = 0; n < rows; n++) sums[n] += added[n * p->residual_row];
            }
            store(p->output, first * p->row + (output + o) * p->column, p->row, sums, rows, 0);
        }
    }
}

/* Products of the same rows with several weights. A sum runs along the inputs in order, whatever the number of rows and
   threads. */
int products(const Matrix *input, const Product *all, int64_t count, int64_t num_rows, int64_t depth,
             int64_t threads) {
    int64_t in_vectors = (num_rows + LANES - 1) / LANES * LANES, num_blocks = 0;
    /* Where rows lie by columns, a last vector goes on into the next column; the last columns' would leave the memory. */
    int64_t num_last = input->row == 1 || num_rows == 1 ? (in_vectors - num_rows + input->column - 1) / input->column : depth;
    if (num_last > depth) num_last = depth;
    float *last = calloc(num_last * in_vectors + 1, sizeof(float));
    if (!last) return NO_MEMORY;
    Columns inputs = {input->data, last, input->column, in_vectors, num_last, depth};
    for (int64_t i = 0; i < count; i++) num_blocks += (all[i].width + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel num_threads(threads)
    {
        if (num_last) {
#pragma omp for schedule(static)
            for (int64_t k = 0; k < num_last; k++)
                load(last + k * in_vectors, input->data, (depth - num_last + k) * input->column, input->row, num_rows, 0);
        }
#pragma omp for schedule(static)
        for (int64_t b = 0; b < num_blocks; b++) {
            const Product *p = all;
            int64_t block = b;
            for (; block >= (p->width + OUTPUTS - 1) / OUTPUTS; p++) block -= (p->width + OUTPUTS - 1) / OUTPUTS;
            multiply_rows(p, block * OUTPUTS, &inputs, num_rows);
        }
    }
    free(last);
    return 0;
}
