/* The five functions of a codec in one pass over memory: what optim/codecs/rows.py, optim/merge.py and DilocoOuter
   compute, to the bit. A codec's file includes this with CODEC defined as its name, after it has defined of a row:

   enum { CODEC_ROW_BYTES, CODEC_RUN }          bytes of a whole row of ROW values; values that share what a run holds
   CODEC_Run                                    where a run's values are, and its scale
   CODEC_Run CODEC_run(row, m, at, &bad)        of the values from value `at` on of a row of m values
   float CODEC_value(run, i, &bad)              the decoded value i of a run; reads memory once, as others may write it
   CODEC_encode_row(x, m, row, &bad)
   double CODEC_row_sqnorm(row, m, &bad)

   All return 0, or 1 where the torch code raises: a value that is not finite, a bad scale. What they write may be partly
   written then. n, first: counts of values. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define OF(name) JOIN(CODEC, name)

/* Encode x (n) into out. sqnorm: what the result decodes to, or NULL; only then is it refused as a reader would. */
EVERY_CPU int OF(encode)(const float *x, int64_t n, uint8_t *out, double *sqnorm)
{
    double total = 0.0;
    for (int64_t first = 0; first < n; first += ROW, out += OF(ROW_BYTES)) {
        int64_t m = shorter(ROW, n - first);
        uint32_t bad = 0;
        OF(encode_row)(x + first, m, out, &bad);
        if (sqnorm)
            total += OF(row_sqnorm)(out, m, &bad);
        if (bad & REFUSED)
            return 1;
    }
    if (sqnorm)
        *sqnorm = total;
    return 0;
}

EVERY_CPU int OF(decode)(const uint8_t *data, int64_t n, float *restrict out)
{
    for (int64_t first = 0; first < n; first += ROW, data += OF(ROW_BYTES), out += ROW) {
        int64_t m = shorter(ROW, n - first);
        uint32_t bad = 0;
        for (int64_t at = 0; at < m; at += OF(RUN)) {
            OF(Run) run = OF(run)(data, m, at, &bad);
            int64_t count = shorter(OF(RUN), m - at);
            for (int64_t i = 0; i < count; i++)
                out[at + i] = OF(value)(run, i, &bad);
        }
        if (bad & REFUSED)
            return 1;
    }
    return 0;
}

EVERY_CPU int OF(sqnorm)(const uint8_t *data, int64_t n, double *sqnorm)
{
    double total = 0.0;
    for (int64_t first = 0; first < n; first += ROW, data += OF(ROW_BYTES)) {
        uint32_t bad = 0;
        total += OF(row_sqnorm)(data, shorter(ROW, n - first), &bad);
        if (bad & REFUSED)
            return 1;
    }
    *sqnorm = total;
    return 0;
}

/* Encode the sum of weight * decoded over the messages, added in their order: merge_part. */
EVERY_CPU int OF(merge)(const uint8_t *const *messages, const float *weights, int64_t messages_count, int64_t n,
                        uint8_t *out)
{
    float total[ROW];
    for (int64_t first = 0, begin = 0; first < n; first += ROW, begin += OF(ROW_BYTES)) {
        int64_t m = shorter(ROW, n - first);
        uint32_t bad = 0;
        for (int64_t k = 0; k < messages_count; k++) {
            float weight = weights[k];
            for (int64_t at = 0; at < m; at += OF(RUN)) {
                OF(Run) run = OF(run)(messages[k] + begin, m, at, &bad);
                int64_t count = shorter(OF(RUN), m - at);
                if (k == 0)
                    for (int64_t i = 0; i < count; i++)
                        total[at + i] = OF(value)(run, i, &bad) * weight;
                else
                    for (int64_t i = 0; i < count; i++)
                        total[at + i] += OF(value)(run, i, &bad) * weight;
            }
        }
        OF(encode_row)(total, m, out + begin, &bad);
        if (bad & REFUSED)
            return 1;
    }
    return 0;
}

/* DilocoOuter.step_into on the n values from value `first` of the encoded vector of `whole` on. The vectors hold these
   n values; a next one may be the one before. */
EVERY_CPU int OF(step)(const uint8_t *data, int64_t whole, int64_t first, int64_t n, float lr, float momentum,
                       int nesterov, const float *theta, const float *velocity, float *next_theta,
                       float *next_velocity)
{
    uint32_t bad = 0;
    for (int64_t done = 0; done < n;) {
        int64_t row = (first + done) / ROW, at = (first + done) % ROW, m = shorter(ROW, whole - row * ROW);
        int64_t count = shorter(OF(RUN) - at % OF(RUN), n - done);
        OF(Run) run = OF(run)(data + row * OF(ROW_BYTES), m, at, &bad);
        if (nesterov)
            for (int64_t i = 0; i < count; i++) {
                float update = OF(value)(run, i, &bad), old = theta[done + i];
                float v = velocity[done + i] * momentum + update;
                next_velocity[done + i] = v;
                next_theta[done + i] = old - (v * momentum + update) * lr;
            }
        else
            for (int64_t i = 0; i < count; i++) {
                float update = OF(value)(run, i, &bad), old = theta[done + i];
                float v = velocity[done + i] * momentum + update;
                next_velocity[done + i] = v;
                next_theta[done + i] = old - v * lr;
            }
        if (bad & REFUSED)
            return 1;
        done += count;
    }
    return 0;
}

#undef CODEC
#undef JOIN_
#undef JOIN
#undef OF
