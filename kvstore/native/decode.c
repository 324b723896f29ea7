/* Decoding: one pass that checks, one that writes. */
#include "ops.h"
#include "stream.h"

int kv_check(const uint8_t *delta, uint64_t n, uint64_t parent_size, uint64_t *out_size)
{
    uint64_t at = KV_HEADER, sum = 0;
    op o = {0};
    if (n < KV_HEADER)
        return KV_TRUNCATED;
    for (uint64_t i = get32(delta + 40); i > 0; i--) {
        int rc = next_op(delta, n, &at, parent_size, &o);
        if (rc != KV_OK)
            return rc;
        sum = o.n > UINT64_MAX - sum ? UINT64_MAX : sum + o.n;
    }
    *out_size = sum;
    return at == n && sum == get64(delta + 32) ? KV_OK : KV_SIZE_MISMATCH;
}

#if KV_SSE2
/* Whole lines of 64 bytes go out with streaming stores. Short pieces are gathered in `stage` first, as is what does not
 * fill a line; `to` is aligned, and what is staged belongs there. */
enum { STAGE = 4096, SHORT = 2048 };

typedef struct {
    uint8_t *to;
    uint64_t staged;
    uint8_t stage[STAGE];
} stream;

static void put_lines(stream *s, const uint8_t *from, uint64_t n)
{
    stream_lines(s->to, from, n);
    s->to += n & ~UINT64_C(63);
}

static void stage(stream *s, const uint8_t *from, uint64_t n)
{
    memcpy(s->stage + s->staged, from, (size_t)n);
    s->staged += n;
}

static void stream_write(stream *s, const uint8_t *from, uint64_t n)
{
    if (n >= SHORT) {
        uint64_t part = (64 - (s->staged & 63)) & 63;
        stage(s, from, part);
        put_lines(s, s->stage, s->staged);
        s->staged = 0;
        put_lines(s, from + part, n - part);
        stage(s, from + n - ((n - part) & 63), (n - part) & 63);
        return;
    }
    uint64_t part = n < STAGE - s->staged ? n : STAGE - s->staged;
    stage(s, from, part);
    if (s->staged == STAGE) {
        put_lines(s, s->stage, STAGE);
        s->staged = 0;
        stage(s, from + part, n - part);
    }
}
#endif

int kv_apply(const uint8_t *delta, uint64_t n, const uint8_t *parent, uint64_t parent_size, uint8_t *out,
             uint64_t out_size)
{
    uint64_t at = KV_HEADER, done = 0;
    int rc = KV_OK;
    op o = {0};
    if (n < KV_HEADER)
        return KV_TRUNCATED;
    uint64_t ops = get32(delta + 40);
#if KV_SSE2
    int streaming = out_size >= STREAM_FROM;
    stream s;
    s.to = out;
    s.staged = 0;
    uint64_t head = (64 - (uint64_t)((uintptr_t)out & 63)) & 63;
#endif
    for (; ops > 0; ops--) {
        if ((rc = next_op(delta, n, &at, parent_size, &o)) != KV_OK)
            break;
        if (o.n > out_size - done) {
            rc = KV_SIZE_MISMATCH;
            break;
        }
        if (o.n == 0)
            continue;
        const uint8_t *from = o.copy ? parent + o.at : o.from;
#if KV_SSE2
        if (streaming) {
            uint64_t size = o.n;
            if (done < head) { /* up to the first whole line */
                uint64_t part = head - done < size ? head - done : size;
                memcpy(out + done, from, (size_t)part);
                s.to += part;
                from += part;
                size -= part;
            }
            if (size)
                stream_write(&s, from, size);
            done += o.n;
            continue;
        }
#endif
        memcpy(out + done, from, (size_t)o.n);
        done += o.n;
    }
#if KV_SSE2
    if (streaming) {
        memcpy(s.to, s.stage, (size_t)s.staged);
        _mm_sfence();
    }
#endif
    if (rc == KV_OK && (at != n || done != out_size))
        rc = KV_SIZE_MISMATCH;
    return rc;
}
