/* What the compiled functions of a decode step share: values of fp32 and bf16, and activations.

Values are fp32, or bf16 with fp32 arithmetic inside, rounded where the torch reference rounds. Strides count elements.
*/

#ifndef CPU_VALUES_H
#define CPU_VALUES_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

int omp_get_thread_num(void);  /* OpenMP's, declared here because not every compiler has its header */

typedef uint16_t bf16;

#if defined(__AVX512F__)
enum { LANES = 16 };
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
enum { LANES = 8 };
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
enum { LANES = 4 };
#define LANE_NUMBERS {0, 1, 2, 3}
#endif

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

typedef struct {  /* [N, E] */
    void *data;
    int64_t row, column;
} Matrix;

enum { NO_MEMORY = 1, BAD_PLACE };  /* what a function returns beside 0 */
enum { SILU, RELU, RELU2, GELU, GELU_TANH, QUICK_GELU };

static inline float float_of(uint32_t bits) {
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline float widen(bf16 x) { return float_of((uint32_t)x << 16); }

static inline bf16 narrow(float x) {  /* to the nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : (bf16)rounded;
}

static inline float round_to(float x, int is_bf16) { return is_bf16 ? widen(narrow(x)) : x; }

static inline float value(const void *data, int64_t index, int is_bf16) {
    return is_bf16 ? widen(((const bf16 *)data)[index]) : ((const float *)data)[index];
}

/* LANES values that are neighbors. */
static inline Vector vector_at(const void *data, int64_t index, int is_bf16) {
    if (!is_bf16) return *(const Vector *)((const float *)data + index);
    const bf16 *from = (const bf16 *)data + index;
#if defined(__AVX512F__)  /* gcc 12 widens halves of the vector and joins them */
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (Vector)(__builtin_convertvector(*(const Halves *)from, Bits) << 16);
#endif
}

/* Of neighbors l and l ^ STEP of two vectors, the sums: those of `one` where bit STEP of l is 0, else those of `other`. */
#define ADD_NEIGHBORS(one, other, STEP)                                                                     \
    (__builtin_shuffle(one, other, lanes + (((lanes & (STEP)) != 0) & LANES)) +                               \
     __builtin_shuffle(one, other, (lanes ^ (STEP)) + (((lanes & (STEP)) != 0) & LANES)))

/* Lane l of the result is the sum of all lanes of vector l, of LANES vectors, which are overwritten. */
static inline Vector sum_of_each(Vector *vectors) {
    const Bits lanes = LANE_NUMBERS;
#if defined(__AVX512F__)
    for (int i = 0; i < 8; i++) vectors[i] = ADD_NEIGHBORS(vectors[i], vectors[i + 8], 8);
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
    for (int i = 0; i < 4; i++) vectors[i] = ADD_NEIGHBORS(vectors[i], vectors[i + 4], 4);
#endif
    for (int i = 0; i < 2; i++) vectors[i] = ADD_NEIGHBORS(vectors[i], vectors[i + 2], 2);
    return ADD_NEIGHBORS(vectors[0], vectors[1], 1);
}

static void load(float *to, const void *from, int64_t start, int64_t stride, int64_t count, int is_bf16) {
    if (is_bf16) {
        const bf16 *x = (const bf16 *)from + start;
        if (stride == 1) for (int64_t i = 0; i < count; i++) to[i] = widen(x[i]);
        else for (int64_t i = 0; i < count; i++) to[i] = widen(x[i * stride]);
    } else {
        const float *x = (const float *)from + start;
        if (stride == 1) memcpy(to, x, count * sizeof(float));
        else for (int64_t i = 0; i < count; i++) to[i] = x[i * stride];
    }
}

static void store(void *to, int64_t start, int64_t stride, const float *from, int64_t count, int is_bf16) {
    if (is_bf16) {
        bf16 *y = (bf16 *)to + start;
        if (stride == 1) for (int64_t i = 0; i < count; i++) y[i] = narrow(from[i]);
        else for (int64_t i = 0; i < count; i++) y[i * stride] = narrow(from[i]);
    } else {
        float *y = (float *)to + start;
        if (stride == 1) memcpy(y, from, count * sizeof(float));
        else for (int64_t i = 0; i < count; i++) y[i * stride] = from[i];
    }
}

/* exp to 2 units in the last place: 2^n times a polynomial (Cephes, expf.c). Below -87.3 it is 0, above 88.7 inf. */
static inline float fast_exp(float x) {
    float clamped = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;
    float n = rintf(clamped * 1.44269504f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t half = (int32_t)n >> 1, rest = (int32_t)n - half;  /* in two halves: 2^128 is no float */
    float y = p * float_of((half + 127) << 23) * float_of((rest + 127) << 23);
    y = x < -87.3f ? 0.0f : x > 88.7f ? INFINITY : y;
    return x != x ? x : y;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

/* erf to 1e-7 (rational approximation of Eigen, MathFunctionsImpl.h). */
static inline float fast_erf(float x) {
    x = x < -3.8325066f ? -3.8325066f : x > 3.8325066f ? 3.8325066f : x;
    float s = x * x;
    float p = -2.72614225801306e-10f;
    p = p * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    float q = -1.45660718464996e-05f;
    q = q * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    return x * p / q;
}

/* One case each, so that the loops inside hold no branch. */
static void activate(float *x, int64_t count, int kind) {
    switch (kind) {
    case SILU: for (int64_t i = 0; i < count; i++) x[i] = x[i] * sigmoid(x[i]); break;
    case RELU: for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0.0f ? 0.0f : x[i]; break;
    case RELU2: for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0.0f ? 0.0f : x[i] * x[i]; break;
    case GELU: for (int64_t i = 0; i < count; i++) x[i] = 0.5f * x[i] * (1.0f + fast_erf(x[i] * 0.70710678f)); break;
    case GELU_TANH:
        for (int64_t i = 0; i < count; i++)
            x[i] = x[i] * sigmoid(1.59576912f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
        break;
    case QUICK_GELU: for (int64_t i = 0; i < count; i++) x[i] = x[i] * sigmoid(1.702f * x[i]); break;
    }
}

#endif
