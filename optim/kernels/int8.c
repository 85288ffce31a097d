/* The codec int8: what optim/codecs/blockwise.py computes, to the bit. A row is an fp32 scale, then a signed byte a
   value. A scale outside [0, 2^120] is refused. */

#include "codec.h"

enum { int8_ROW_BYTES = ROW + 4, int8_RUN = ROW, QMAX = 127 };

static const float TINY = 0x1p-126f;         /* the smallest normal number: its reciprocal is finite */
static const float SCALE_MAX = 0x1p120f;     /* 128 times that is finite */
static const float MAGIC = 12582912.0f;      /* 1.5 * 2^23: adding it rounds to an integer, a half to the even one */
static const uint32_t INFINITE = 0x7f800000; /* of positive floats, order of bits is order of values; NaN is above */

typedef struct {
    const int8_t *q;
    float scale;
} int8_Run;

INLINE int8_Run int8_run(const uint8_t *row, int64_t m, int64_t at, uint32_t *bad)
{
    int8_Run run = {(const int8_t *)row + 4 + at, 0.0f};
    (void)m;
    memcpy(&run.scale, row, 4);
    if (!(run.scale >= 0.0f && run.scale <= SCALE_MAX))
        *bad |= REFUSED;
    return run;
}

INLINE float int8_value(int8_Run run, int64_t i, uint32_t *bad)
{
    (void)bad;
    return (float)run.q[i] * run.scale;
}

INLINE double int8_row_sqnorm(const uint8_t *row, int64_t m, uint32_t *bad)
{
    int8_Run run = int8_run(row, m, 0, bad);
    int32_t sum = 0; /* at most 4096 * 2^14: exact */
    for (int64_t i = 0; i < m; i++)
        sum += (int32_t)run.q[i] * (int32_t)run.q[i];
    return (double)sum * ((double)run.scale * (double)run.scale);
}

INLINE void int8_encode_row(const float *restrict x, int64_t m, uint8_t *restrict row, uint32_t *bad)
{
    int32_t largest = 0;
    for (int64_t i = 0; i < m; i++) {
        int32_t magnitude = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        largest = magnitude > largest ? magnitude : largest;
    }
    if ((uint32_t)largest >= INFINITE)
        *bad |= REFUSED;
    float rounded_up = float_of((bits_of(float_of((uint32_t)largest) / (float)QMAX) + 127) & ~(uint32_t)127);
    float scale = rounded_up < TINY ? TINY : rounded_up, inverse = 1.0f / scale;
    memcpy(row, &scale, 4);
    int8_t *restrict q = (int8_t *)row + 4;
    for (int64_t i = 0; i < m; i++)
        q[i] = (int8_t)(uint8_t)bits_of(x[i] * inverse + MAGIC); /* the mantissa's low bits are the integer's */
}

#define CODEC int8
#include "codec_functions.h"
