/* The codecs int8, int4 and two_bit: what optim/codecs/blockwise.py and two_bit.py compute, to the bit. A row of int8 is
   an fp32 scale, then a signed byte a value; of int4 a bf16 scale for each 128 values, then a byte for two; of two_bit
   the same scales, then a byte for four. A scale outside [0, 2^120] is refused. */

#include "codec.h"

static const float TINY = 0x1p-126f;         /* the smallest normal number: its reciprocal is finite */
static const float SCALE_MAX = 0x1p120f;     /* 128 times that is finite */
static const float MAGIC = 12582912.0f;      /* 1.5 * 2^23: adding it rounds to an integer, a half to the even one */
static const uint32_t INFINITE = 0x7f800000; /* of positive floats, order of bits is order of values; NaN is above */

INLINE float checked(float scale, uint32_t *bad)
{
    if (!(scale >= 0.0f && scale <= SCALE_MAX))
        *bad |= REFUSED;
    return scale;
}

/* The scale of values: absmax / qmax, rounded up until the bits of `mask` are 0. */
INLINE float scale_up(const float *restrict x, int64_t m, float qmax, uint32_t mask, uint32_t *bad)
{
    int32_t largest = 0;
    for (int64_t i = 0; i < m; i++) {
        int32_t magnitude = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        largest = magnitude > largest ? magnitude : largest;
    }
    if ((uint32_t)largest >= INFINITE)
        *bad |= REFUSED;
    float scale = float_of((bits_of(float_of((uint32_t)largest) / qmax) + mask) & ~mask);
    return scale < TINY ? TINY : scale;
}

INLINE void quantize(const float *restrict x, int64_t m, float inverse, int8_t *restrict q)
{
    for (int64_t i = 0; i < m; i++)
        q[i] = (int8_t)(uint8_t)bits_of(x[i] * inverse + MAGIC); /* the mantissa's low bits are the integer's */
}

enum { int8_ROW_BYTES = ROW + 4, int8_RUN = ROW };

typedef struct {
    const int8_t *q;
    float scale;
} int8_Run;

INLINE int8_Run int8_run(const uint8_t *row, int64_t m, int64_t at, uint32_t *bad)
{
    float scale;
    (void)m;
    memcpy(&scale, row, 4);
    return (int8_Run){(const int8_t *)row + 4 + at, checked(scale, bad)};
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
    float scale = scale_up(x, m, 127.0f, 0x7f, bad);
    memcpy(row, &scale, 4);
    quantize(x, m, 1.0f / scale, (int8_t *)row + 4);
}

enum { BLOCK = 128, int4_ROW_BYTES = ROW / BLOCK * 2 + ROW / 2, int4_RUN = BLOCK / 2 };

/* Half a block: the halves of a row meet in the middle of one if it has an odd number of them. */
typedef struct {
    const int8_t *q;
    float scale;
    int second; /* whether the values are of the row's second half */
} int4_Run;

INLINE int64_t padded(int64_t m) { return (m + BLOCK - 1) / BLOCK * BLOCK; }

/* The scale of the block of value `at`, in bf16 as int4 and two_bit have it. */
INLINE float block_scale(const uint8_t *row, int64_t at, uint32_t *bad)
{
    uint16_t scale;
    memcpy(&scale, row + at / BLOCK * 2, 2);
    return checked(float_of((uint32_t)scale << 16), bad);
}

INLINE int4_Run int4_run(const uint8_t *row, int64_t m, int64_t at, uint32_t *bad)
{
    int64_t half = padded(m) / 2;
    int second = at >= half;
    const int8_t *q = (const int8_t *)row + padded(m) / BLOCK * 2 + (second ? at - half : at);
    return (int4_Run){q, block_scale(row, at, bad), second};
}

INLINE int32_t int4_integer(int4_Run run, int64_t i)
{
    int32_t both = run.q[i];                          /* 16 * high + low */
    int32_t high = (both + 7 + (both >> 4 & 1)) >> 4; /* a sixteenth, rounded as torch does: a half to the even one */
    return run.second ? high : both - 16 * high;
}

INLINE float int4_value(int4_Run run, int64_t i, uint32_t *bad)
{
    (void)bad;
    /* Torch rounds to a high of -0 what is below 0. */
    uint32_t sign = run.second ? (uint32_t)(int32_t)run.q[i] & 0x80000000 : 0;
    return float_of(bits_of((float)int4_integer(run, i)) | sign) * run.scale;
}

INLINE double int4_row_sqnorm(const uint8_t *row, int64_t m, uint32_t *bad)
{
    double total = 0.0;
    for (int64_t at = 0; at < m; at += int4_RUN) {
        int4_Run run = int4_run(row, m, at, bad);
        int64_t count = shorter(int4_RUN, m - at);
        int32_t sum = 0;
        for (int64_t i = 0; i < count; i++)
            sum += int4_integer(run, i) * int4_integer(run, i);
        total += (double)sum * ((double)run.scale * (double)run.scale);
    }
    return total;
}

INLINE void int4_encode_row(const float *restrict x, int64_t m, uint8_t *restrict row, uint32_t *bad)
{
    int8_t q[ROW];
    int64_t whole = padded(m), half = whole / 2;
    for (int64_t at = 0; at < whole; at += BLOCK) {
        float block[BLOCK] = {0.0f};
        memcpy(block, x + at, (size_t)shorter(BLOCK, m - at) * sizeof(float));
        float scale = scale_up(block, BLOCK, 7.0f, 0xffff, bad);
        uint16_t high = (uint16_t)(bits_of(scale) >> 16);
        memcpy(row + at / BLOCK * 2, &high, 2);
        quantize(block, BLOCK, 1.0f / scale, q + at);
    }
    int8_t *restrict packed = (int8_t *)row + whole / BLOCK * 2;
    for (int64_t i = 0; i < half; i++)
        packed[i] = (int8_t)(q[i] + 16 * q[half + i]);
}

enum { QUARTER = BLOCK / 4, two_bit_ROW_BYTES = ROW / BLOCK * 2 + ROW / 4, two_bit_RUN = QUARTER };

static const double SMALL = 0.4527800346364921, LARGE = 1.510417608499096; /* magnitudes, in standard deviations */
static const double DEVIATIONS = 1.2533141373155003; /* a normal distribution's, by mean magnitudes: sqrt(pi / 2) */

/* A quarter of a block: its codes lie at the same bits of successive bytes. */
typedef struct {
    const uint8_t *q;
    int shift;          /* of a code's low bit */
    float small, large; /* the decoded magnitudes */
} two_bit_Run;

INLINE two_bit_Run two_bit_run(const uint8_t *row, int64_t m, int64_t at, uint32_t *bad)
{
    const uint8_t *q = row + padded(m) / BLOCK * 2 + at / BLOCK * QUARTER + at % QUARTER;
    float scale = block_scale(row, at, bad);
    return (two_bit_Run){q, (int)(at % BLOCK / QUARTER) * 2, (float)SMALL * scale, (float)LARGE * scale};
}

INLINE float two_bit_value(two_bit_Run run, int64_t i, uint32_t *bad)
{
    (void)bad;
    uint32_t code = (uint32_t)run.q[i] >> run.shift;
    uint32_t magnitude = bits_of(code & 2 ? run.large : run.small);
    return float_of(magnitude ^ (~code << 31)); /* a sign of 0 is below 0 */
}

INLINE double two_bit_row_sqnorm(const uint8_t *row, int64_t m, uint32_t *bad)
{
    double total = 0.0;
    for (int64_t at = 0; at < m; at += two_bit_RUN) {
        two_bit_Run run = two_bit_run(row, m, at, bad);
        int64_t count = shorter(two_bit_RUN, m - at);
        int32_t large = 0;
        for (int64_t i = 0; i < count; i++)
            large += run.q[i] >> run.shift >> 1 & 1;
        total += (double)(count - large) * ((double)run.small * (double)run.small);
        total += (double)large * ((double)run.large * (double)run.large);
    }
    return total;
}

/* Add the second half of 2 * half values to the first one. */
INLINE void fold(float *sums, int half)
{
    for (int i = 0; i < half; i++)
        sums[i] += sums[i + half];
}

/* The sum of a block, which is overwritten: its second half is added to its first one, and so on with the result. */
INLINE float block_sum(float *block)
{
    fold(block, 64), fold(block, 32), fold(block, 16), fold(block, 8), fold(block, 4), fold(block, 2), fold(block, 1);
    return block[0];
}

INLINE uint32_t two_bit_code(float x, float threshold)
{
    return (uint32_t)(float_of(bits_of(x) & 0x7fffffff) > threshold) << 1 | (x >= 0.0f);
}

/* Encode a block of `real` values, then zeros; return its scale. */
INLINE float two_bit_encode_block(const float *restrict x, float real, uint8_t *restrict packed)
{
    float sizes[BLOCK], large[BLOCK];
    int32_t count = 0;
    for (int i = 0; i < BLOCK; i++)
        sizes[i] = float_of(bits_of(x[i]) & 0x7fffffff);
    float total = block_sum(sizes);
    float threshold = total / real * (float)((SMALL + LARGE) / 2 * DEVIATIONS);
    for (int i = 0; i < BLOCK; i++) {
        float size = float_of(bits_of(x[i]) & 0x7fffffff);
        large[i] = size > threshold ? size : 0.0f;
        count += size > threshold;
    }
    for (int i = 0; i < QUARTER; i++) {
        uint32_t codes = 0;
        for (int k = 0; k < 4; k++)
            codes |= two_bit_code(x[i + k * QUARTER], threshold) << 2 * k;
        packed[i] = (uint8_t)codes;
    }
    float squares = real * (float)(SMALL * SMALL) + (float)count * (float)(LARGE * LARGE - SMALL * SMALL);
    return (total * (float)SMALL + block_sum(large) * (float)(LARGE - SMALL)) / squares;
}

INLINE void two_bit_encode_row(const float *restrict x, int64_t m, uint8_t *restrict row, uint32_t *bad)
{
    uint8_t *restrict packed = row + padded(m) / BLOCK * 2;
    for (int64_t at = 0; at < m; at += BLOCK, packed += QUARTER) {
        float scale;
        if (m - at >= BLOCK) {
            scale = two_bit_encode_block(x + at, (float)BLOCK, packed);
        } else {
            float last[BLOCK] = {0.0f};
            memcpy(last, x + at, (size_t)(m - at) * sizeof(float));
            scale = two_bit_encode_block(last, (float)(m - at), packed);
        }
        uint32_t bits = bits_of(checked(scale, bad)); /* a scale is not finite if a value is not */
        uint16_t high = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        memcpy(row + at / BLOCK * 2, &high, 2);
    }
}

#define CODEC int8
#include "codec_functions.h"
#define CODEC int4
#include "codec_functions.h"
#define CODEC two_bit
#include "codec_functions.h"
