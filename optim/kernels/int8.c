/* The codec int8 in one pass over memory: what optim/codecs/blockwise.py and optim/merge.py compute, to the bit.

   A row is up to 4096 values: an fp32 scale, then a signed byte a value. Little-endian, like all machines we run on.

   Peers compare hashes of what these functions write. So each operation has its own rounding, and the file is compiled
   without fused multiply-add and without -ffast-math. The copies for wider registers have the same operations in the
   same order: only sums of integers, and the norms, which need no equal bits, are added up in another order.

   All return 0, or 1 where the torch code raises: a value that is not finite, a scale outside [0, 2^120]. What they
   write may be partly written then. n, first: counts of values. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { ROW = 4096, ROW_BYTES = ROW + 4, QMAX = 127 };

static const float TINY = 0x1p-126f;         /* the smallest normal number: its reciprocal is finite */
static const float SCALE_MAX = 0x1p120f;     /* 128 times that is finite */
static const float MAGIC = 12582912.0f;      /* 1.5 * 2^23: adding it rounds to an integer, a half to the even one */
static const uint32_t INFINITE = 0x7f800000; /* of positive floats, order of bits is order of values; NaN is above */

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }

/* Read a row's scale; whether it is refused. */
INLINE int read_scale(const uint8_t *row, float *scale)
{
    memcpy(scale, row, 4);
    return !(*scale >= 0.0f && *scale <= SCALE_MAX);
}

INLINE double row_sqnorm(const int8_t *q, int64_t m, float scale)
{
    int32_t sum = 0; /* at most 4096 * 2^14: exact */
    for (int64_t i = 0; i < m; i++)
        sum += (int32_t)q[i] * (int32_t)q[i];
    return (double)sum * ((double)scale * (double)scale);
}

INLINE int encode_row(const float *restrict x, int64_t m, uint8_t *restrict row, float *scale)
{
    int32_t largest = 0;
    for (int64_t i = 0; i < m; i++) {
        int32_t magnitude = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        largest = magnitude > largest ? magnitude : largest;
    }
    if ((uint32_t)largest >= INFINITE)
        return 1;
    float rounded_up = float_of((bits_of(float_of((uint32_t)largest) / (float)QMAX) + 127) & ~(uint32_t)127);
    *scale = rounded_up < TINY ? TINY : rounded_up;
    float inverse = 1.0f / *scale;
    memcpy(row, scale, 4);
    int8_t *restrict q = (int8_t *)row + 4;
    for (int64_t i = 0; i < m; i++)
        q[i] = (int8_t)(uint8_t)bits_of(x[i] * inverse + MAGIC); /* the mantissa's low bits are the integer's */
    return 0;
}

/* Encode x (n) into out. sqnorm: what the result decodes to, or NULL; only then is a scale refused, as a reader would. */
EVERY_CPU int int8_encode(const float *x, int64_t n, uint8_t *out, double *sqnorm)
{
    double total = 0.0;
    for (int64_t first = 0; first < n; first += ROW, out += ROW_BYTES) {
        int64_t m = shorter(ROW, n - first);
        float scale;
        if (encode_row(x + first, m, out, &scale))
            return 1;
        if (sqnorm) {
            if (scale > SCALE_MAX)
                return 1;
            total += row_sqnorm((const int8_t *)out + 4, m, scale);
        }
    }
    if (sqnorm)
        *sqnorm = total;
    return 0;
}

EVERY_CPU int int8_decode(const uint8_t *data, int64_t n, float *restrict out)
{
    for (int64_t first = 0; first < n; first += ROW, data += ROW_BYTES) {
        int64_t m = shorter(ROW, n - first);
        const int8_t *q = (const int8_t *)data + 4;
        float scale;
        if (read_scale(data, &scale))
            return 1;
        for (int64_t i = 0; i < m; i++)
            out[first + i] = (float)q[i] * scale;
    }
    return 0;
}

EVERY_CPU int int8_sqnorm(const uint8_t *data, int64_t n, double *sqnorm)
{
    double total = 0.0;
    for (int64_t first = 0; first < n; first += ROW, data += ROW_BYTES) {
        float scale;
        if (read_scale(data, &scale))
            return 1;
        total += row_sqnorm((const int8_t *)data + 4, shorter(ROW, n - first), scale);
    }
    *sqnorm = total;
    return 0;
}

/* Encode the sum of weight * decoded over the messages, added in their order: merge_part. */
EVERY_CPU int int8_merge(const uint8_t *const *messages, const float *weights, int64_t count, int64_t n, uint8_t *out)
{
    float total[ROW];
    for (int64_t first = 0, begin = 0; first < n; first += ROW, begin += ROW_BYTES) {
        int64_t m = shorter(ROW, n - first);
        float scale;
        for (int64_t k = 0; k < count; k++) {
            const int8_t *q = (const int8_t *)messages[k] + begin + 4;
            float weight = weights[k];
            if (read_scale(messages[k] + begin, &scale))
                return 1;
            if (k == 0)
                for (int64_t i = 0; i < m; i++)
                    total[i] = (float)q[i] * scale * weight;
            else
                for (int64_t i = 0; i < m; i++)
                    total[i] += (float)q[i] * scale * weight;
        }
        if (encode_row(total, m, out + begin, &scale))
            return 1;
    }
    return 0;
}

/* DilocoOuter.step_into on the n values from value `first` of the encoded vector on. The vectors hold these n values;
   a next one may be the one before. */
EVERY_CPU int int8_step(const uint8_t *data, int64_t first, int64_t n, float lr, float momentum, int nesterov,
                        const float *theta, const float *velocity, float *next_theta, float *next_velocity)
{
    for (int64_t done = 0; done < n;) {
        int64_t column = (first + done) % ROW, m = shorter(ROW - column, n - done);
        const uint8_t *row = data + (first + done) / ROW * ROW_BYTES;
        const int8_t *q = (const int8_t *)row + 4 + column;
        float scale;
        if (read_scale(row, &scale))
            return 1;
        if (nesterov)
            for (int64_t i = 0; i < m; i++) {
                float update = (float)q[i] * scale, old = theta[done + i];
                float v = velocity[done + i] * momentum + update;
                next_velocity[done + i] = v;
                next_theta[done + i] = old - (v * momentum + update) * lr;
            }
        else
            for (int64_t i = 0; i < m; i++) {
                float update = (float)q[i] * scale, old = theta[done + i];
                float v = velocity[done + i] * momentum + update;
                next_velocity[done + i] = v;
                next_theta[done + i] = old - v * lr;
            }
        done += m;
    }
    return 0;
}
