/* Winnowing: the minimizers of many windows at once, by loops that compilers vectorize (see minimizers.h). */
#include "minimizers.h"

/* Buffers are padded to whole vectors of LANES elements: a loop over the remainder would be slow. */
enum { LANES = 32 };

/* out[i]: the least, or greatest, of in[i], in[i + step], in[i + 2 step] and in[i + 3 step]. Compilers vectorize this only
 * with separate buffers and restricted pointers. */
#define OF_FOUR(name, than)                                                                                              \
    KV_INLINE void name(const int16_t *KV_RESTRICT in, int16_t *KV_RESTRICT out, size_t step, size_t n)                  \
    {                                                                                                                    \
        const int16_t *b = in + step, *c = b + step, *d = c + step;                                                      \
        for (size_t i = 0; i < n; i++) {                                                                                 \
            const int16_t x = in[i] than b[i] ? in[i] : b[i], y = c[i] than d[i] ? c[i] : d[i];                          \
            out[i] = x than y ? x : y;                                                                                   \
        }                                                                                                                \
    }
OF_FOUR(least_of, <)
OF_FOUR(greatest_of, >)

static void fill(int16_t *p, unsigned n, int16_t value)
{
    for (unsigned i = 0; i < n; i++)
        p[i] = value;
}

KV_INLINE unsigned winnow_any(const uint8_t *p, unsigned n, uint16_t *positions)
{
    enum { ROOM = WINNOW_MAX + 5 * WINDOW };
    int16_t orders[ROOM], a[ROOM], b[ROOM];
    const unsigned all = n + WINDOW - 1, whole = all / LANES * LANES, rounded = whole + LANES;
    unsigned count = 0;
    for (unsigned i = 0; i < whole; i += LANES)
        order(p + i, orders + i);
    uint8_t rest[LANES + 3] = {0};
    memcpy(rest, p + whole, all - whole + 3);
    order(rest, orders + whole);
    /* The least order of the window at each position, ... */
    fill(orders + all, 48 + LANES, INT16_MAX);
    fill(a + rounded, 48, INT16_MAX);
    fill(b + rounded, 16, INT16_MAX);
    least_of(orders, a, 1, rounded);
    least_of(a, b, 4, rounded);
    for (size_t i = 0; i < rounded; i++)
        a[WINDOW + i] = b[i] < b[i + 16] ? b[i] : b[i + 16];
    /* ... then the greatest of those leasts over the 32 windows that a k-mer belongs to. It is the k-mer's own order exactly
     * if the k-mer is a minimizer of one of them. */
    fill(a, WINDOW, INT16_MIN);
    fill(a + WINDOW + n, 2 * LANES, INT16_MIN);
    fill(b + rounded, 48, INT16_MIN);
    greatest_of(a + 1, b, 1, rounded);
    greatest_of(b, a, 4, rounded);
    fill(a + rounded, 16, INT16_MIN);
    for (size_t i = 0; i < rounded; i++)
        b[i] = a[i] > a[i + 16] ? a[i] : a[i + 16];
    for (unsigned i = 0; i < all; i += LANES) {
        uint64_t mask = equal_mask(b + i, orders + i);
        if (all - i < LANES)
            mask &= (UINT64_C(1) << (all - i)) - 1;
        /* Two on average; the first four are written without a branch, which would be mispredicted. */
        for (int k = 0; k < 4; k++) {
            positions[count] = (uint16_t)(i + lowest_bit(mask | UINT64_C(1) << LANES));
            count += mask != 0;
            mask &= mask - (mask != 0);
        }
        for (; mask; mask &= mask - 1)
            positions[count++] = (uint16_t)(i + lowest_bit(mask));
    }
    return count;
}

KV_AVX2 static unsigned winnow_avx2(const uint8_t *p, unsigned n, uint16_t *positions)
{
    return winnow_any(p, n, positions);
}

static unsigned winnow_plain(const uint8_t *p, unsigned n, uint16_t *positions)
{
    return winnow_any(p, n, positions);
}

unsigned kv_winnow(const uint8_t *p, unsigned n, uint16_t *positions)
{
    return has_avx2() ? winnow_avx2(p, n, positions) : winnow_plain(p, n, positions);
}
