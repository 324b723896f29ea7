/* Decoding a chain of deltas, from the leaf to the whole state at its root, while each link is read once, in its order.
 *
 * Before each link the output lacks some ranges of the state that this link encodes. They are disjoint and sorted by their
 * source. A literal that overlaps a range fills it; a COPY that overlaps one makes a range of the next state up the chain.
 * At the end of the link the new ranges are sorted. Where two of them overlap (the link copies some bytes twice), the bytes
 * are taken once: the second becomes a *repeat*, a copy inside the output, done after the last link. Ranges therefore stay
 * disjoint, and there are never more of them than the chain has ops so far.
 *
 * A repeat reads what other repeats of its own link, before it, and of later links have written. Each link's repeats are
 * stored in reverse, so all are done from the last to the first. */
#include "kernel.h"

#include "stream.h"

/* Pieces of this size and more go around the cache if the output is large. */
enum { STREAM_PIECE = 4096 };

/* Short pieces of a literal wait in a queue, while the lines of the output that they fill are fetched: for a transposed V each
 * lies in another page. Bytes of the link are fetched this far ahead. 800,000 pieces of 200 bytes took 117 ms with neither, 85
 * with the queue, 76 with both. */
enum { QUEUE = 16, FETCHED = 384, AHEAD = 2048 };

enum { HEADER, OPS }; /* stages of a link */
enum { OP_COPY, OP_LITERAL };

KV_INLINE uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

#if KV_SSE2
static void stream_piece(uint8_t *to, const uint8_t *from, uint64_t n)
{
    const uint64_t head = (64 - (uint64_t)((uintptr_t)to & 63)) & 63, lines = (n - head) & ~UINT64_C(63);
    memcpy(to, from, (size_t)head);
    stream_lines(to + head, from + head, lines);
    memcpy(to + head + lines, from + head + lines, (size_t)(n - head - lines));
}
#endif

typedef struct {
    uint8_t *to[QUEUE];
    const uint8_t *from[QUEUE];
    size_t n[QUEUE];
    unsigned next;
    uint8_t nothing;
} queue;

static void start_queue(queue *q)
{
    q->next = 0;
    q->nothing = 0;
    for (unsigned i = 0; i < QUEUE; i++) {
        q->to[i] = &q->nothing;
        q->from[i] = &q->nothing;
        q->n[i] = 0;
    }
}

/* Copies what waits. */
static void end_queue(queue *q)
{
    for (unsigned i = 0; i < QUEUE; i++)
        memcpy(q->to[i], q->from[i], q->n[i]);
}

KV_INLINE void put_piece(queue *q, uint8_t *to, const uint8_t *from, uint64_t n, int streaming)
{
#if KV_SSE2
    if (streaming && n >= STREAM_PIECE) {
        stream_piece(to, from, n);
        return;
    }
#endif
    (void)streaming;
    const unsigned i = q->next++ % QUEUE;
    memcpy(q->to[i], q->from[i], q->n[i]);
    q->to[i] = to;
    q->from[i] = from;
    q->n[i] = (size_t)n;
    for (uint64_t k = 0; k < FETCHED && k < n; k += 64) {
        PREFETCH(to + k);
        PREFETCH((uintptr_t)from + AHEAD + k);
    }
    PREFETCH(to + n - 1);
}

void kv_chain_begin(kv_chain *c, int full, uint64_t stored)
{
    if (c->level == 0) {
        c->ranges[0].dst = c->ranges[0].src = 0;
        c->ranges[0].n = c->size;
        c->n_ranges = c->size != 0;
        c->expected = c->size;
    }
    c->stored = stored;
    c->seen = 0;
    c->full = full;
    c->excess = 0;
    c->n_made = 0;
    memset(&c->walk, 0, sizeof c->walk);
    if (full) {
        c->walk.stage = OPS;
        c->walk.code = OP_LITERAL;
        c->walk.left = stored;
        c->link_size = stored;
    }
}

/* Moves past n bytes of the op, and of the state. */
KV_INLINE void advance(kv_chain_walk *w, uint64_t n)
{
    w->left -= n;
    w->source += n;
    w->pos = n > UINT64_MAX - w->pos ? UINT64_MAX : w->pos + n;
}

/* Writes what the ranges lack of the next n bytes of a literal. */
KV_INLINE void fill(const kv_chain *c, kv_chain_walk *w, queue *q, const uint8_t *from, uint64_t n, int streaming)
{
    const uint64_t stop = n > UINT64_MAX - w->pos ? UINT64_MAX : w->pos + n, start = w->pos;
    const kv_range *const ranges = c->ranges;
    uint8_t *const out = c->out;
    const uint64_t n_ranges = c->n_ranges;
    uint64_t i = w->range;
    for (; i < n_ranges && ranges[i].src < stop; i++) {
        const kv_range r = ranges[i];
        const uint64_t end = r.src + r.n, a = r.src > start ? r.src : start, b = least(end, stop);
        const uint64_t dst = r.dst + (a - r.src);
        put_piece(q, out + dst, from + (a - start), b - a, streaming);
        if (b < end)
            break;
    }
    w->range = i;
    advance(w, n);
}

/* Makes ranges of the next state of what the ranges lack of a COPY. */
KV_INLINE int redirect(kv_chain *c, kv_chain_walk *w)
{
    const uint64_t stop = w->left > UINT64_MAX - w->pos ? UINT64_MAX : w->pos + w->left, start = w->pos;
    const kv_range *const ranges = c->ranges;
    kv_range *const made = c->made;
    const uint64_t n_ranges = c->n_ranges, room = c->room;
    uint64_t i = w->range, n_made = c->n_made;
    for (; i < n_ranges && ranges[i].src < stop; i++) {
        const kv_range r = ranges[i];
        const uint64_t end = r.src + r.n, a = r.src > start ? r.src : start, b = least(end, stop);
        const uint64_t dst = r.dst + (a - r.src), src = w->source + (a - start);
        kv_range *last = made + (n_made ? n_made - 1 : 0);
        if (n_made && last->dst + last->n == dst && last->src + last->n == src) {
            last->n += b - a;
        } else if (n_made == room) {
            c->n_made = n_made;
            w->range = i;
            advance(w, a - start);
            return KV_MORE;
        } else {
            made[n_made].dst = dst;
            made[n_made].src = src;
            made[n_made].n = b - a;
            n_made++;
        }
        if (b < end)
            break;
    }
    c->n_made = n_made;
    w->range = i;
    advance(w, w->left);
    return KV_OK;
}

static int read_header(kv_chain *c, const uint8_t *head, kv_chain_walk *w)
{
    if (memcmp(head, "BKVD\1\0\0\0", 8) != 0)
        return KV_NOT_SHARED;
    c->parent_id = get64(head + 8);
    c->parent_size = get64(head + 16);
    c->parent_hash = get64(head + 24);
    c->link_size = get64(head + 32);
    w->n_ops = (uint32_t)(get64(head + 36) >> 32);
    w->stage = OPS;
    return c->level && c->link_size != c->expected ? KV_WRONG_PARENT : KV_OK;
}

/* Starts the op whose code and arguments are at `head`; `rest` bytes of the link follow them. */
KV_INLINE int start_op(const kv_chain *c, kv_chain_walk *w, const uint8_t *head, uint64_t rest)
{
    const uint64_t arg = get64(head + 1);
    w->n_ops--;
    w->code = head[0];
    if (head[0] == OP_LITERAL) {
        if (arg > rest)
            return KV_TRUNCATED_LITERAL;
        w->left = arg;
        return KV_OK;
    }
    w->source = arg;
    w->left = get64(head + 9);
    return arg > c->parent_size || w->left > c->parent_size - arg ? KV_COPY_RANGE : KV_OK;
}

/* The bytes that the next header or op head has, as far as the bytes of it in w->head tell. */
KV_INLINE unsigned head_size(const kv_chain_walk *w)
{
    if (w->stage == HEADER)
        return KV_HEADER;
    return w->n_head >= 9 && w->head[0] == OP_COPY ? 17 : 9;
}

/* Reads a header or op head that a border of blocks may split. Moves *p behind what it took. */
static int read_split_head(kv_chain *c, kv_chain_walk *w, const uint8_t **p, const uint8_t *end, uint64_t rest)
{
    while (w->n_head < head_size(w) && *p < end) {
        w->head[w->n_head++] = *(*p)++;
        rest--;
    }
    if (w->n_head < head_size(w))
        return KV_OK;
    w->n_head = 0;
    if (w->stage == HEADER)
        return read_header(c, w->head, w);
    return w->head[0] > OP_LITERAL ? KV_UNKNOWN_OP : start_op(c, w, w->head, rest);
}

KV_INLINE int read_block(kv_chain *c, kv_chain_walk *w, const uint8_t *block, const uint8_t *end, const uint8_t **at)
{
    const int streaming = c->size >= STREAM_FROM;
    const uint64_t rest = c->stored - c->seen; /* of the link, from `block` on */
    const uint8_t *p = block;
    int rc = KV_OK;
    queue q;
    start_queue(&q);
    for (;;) {
        if (w->left && w->code == OP_LITERAL) {
            const uint64_t n = least(w->left, (uint64_t)(end - p));
            fill(c, w, &q, p, n, streaming);
            p += n;
            if (w->left)
                break;
        } else if (w->left && (rc = redirect(c, w)) != KV_OK) {
            break;
        }
        if (p == end)
            break;
        if (w->stage == OPS && w->n_ops == 0) {
            c->excess = 1;
            p = end;
            break;
        }
        if (w->stage == OPS && w->n_head == 0 && end - p >= 17 && p[0] <= OP_LITERAL) {
            const uint8_t *head = p;
            p += head[0] == OP_LITERAL ? 9 : 17;
            rc = start_op(c, w, head, rest - (uint64_t)(p - block));
        } else {
            rc = read_split_head(c, w, &p, end, rest - (uint64_t)(p - block));
        }
        if (rc != KV_OK)
            break;
    }
    end_queue(&q);
    *at = p;
    return rc;
}

int kv_chain_read(kv_chain *c, const uint8_t *block, uint64_t n, uint64_t *used)
{
    const uint8_t *p = block;
    const uint64_t rest = c->stored - c->seen, surplus = n > rest ? n - rest : 0;
    if (surplus)
        c->excess = 1;
    kv_chain_walk w = c->walk; /* a local copy can stay in registers */
    const int rc = read_block(c, &w, block, block + (n - surplus), &p);
    c->walk = w;
    c->seen += (uint64_t)(p - block);
    *used = (uint64_t)(p - block) + (rc == KV_MORE ? 0 : surplus);
    return rc;
}

/* Merges neighbouring ascending runs until one is left: n log n at worst, one look at ranges that are sorted already.
 * `other` has the same room. Returns the one of both that holds the result. */
static kv_range *sort(kv_range *ranges, kv_range *other, uint64_t n)
{
    for (;;) {
        uint64_t at = 0, runs = 0;
        while (at < n) {
            uint64_t middle = at + 1, stop;
            while (middle < n && ranges[middle - 1].src <= ranges[middle].src)
                middle++;
            if (at == 0 && middle == n)
                return ranges;
            for (stop = middle + (middle < n); stop < n && ranges[stop - 1].src <= ranges[stop].src; stop++)
                ;
            uint64_t a = at, b = middle;
            for (uint64_t k = at; k < stop; k++)
                other[k] = b == stop || (a < middle && ranges[a].src <= ranges[b].src) ? ranges[a++] : ranges[b++];
            at = stop;
            runs++;
        }
        kv_range *swap = ranges;
        ranges = other;
        other = swap;
        if (runs <= 1)
            return ranges;
    }
}

/* The number of ranges that begin inside an earlier one; they are sorted. */
static uint64_t count_overlaps(const kv_range *ranges, uint64_t n)
{
    uint64_t end = 0, count = 0;
    for (uint64_t i = 0; i < n; i++) {
        count += ranges[i].src < end;
        end = ranges[i].src + ranges[i].n > end ? ranges[i].src + ranges[i].n : end;
    }
    return count;
}

/* Makes sorted ranges disjoint and joins those that continue each other. There is room for the repeats. */
static void make_disjoint(kv_chain *c)
{
    kv_range *const ranges = c->ranges;
    kv_range holder = {0, 0, 0}; /* of the ranges so far, the one that ends last */
    uint64_t n = 0, first = c->n_repeats;
    for (uint64_t i = 0; i < c->n_ranges; i++) {
        kv_range r = ranges[i];
        const uint64_t end = holder.src + holder.n;
        if (r.src < end) {
            const uint64_t overlap = least(end - r.src, r.n);
            kv_range *repeat = &c->repeats[c->n_repeats++];
            repeat->dst = r.dst;
            repeat->src = holder.dst + (r.src - holder.src);
            repeat->n = overlap;
            if (overlap == r.n)
                continue;
            holder = r;
            r.dst += overlap;
            r.src += overlap;
            r.n -= overlap;
        } else {
            holder = r;
        }
        if (n && ranges[n - 1].src + ranges[n - 1].n == r.src && ranges[n - 1].dst + ranges[n - 1].n == r.dst)
            ranges[n - 1].n += r.n;
        else
            ranges[n++] = r;
    }
    c->n_ranges = n;
    for (uint64_t last = c->n_repeats; last > first + 1; first++) {
        kv_range swap = c->repeats[--last];
        c->repeats[last] = c->repeats[first];
        c->repeats[first] = swap;
    }
}

static int check_end(const kv_chain *c)
{
    const kv_chain_walk *w = &c->walk;
    if (w->stage == HEADER)
        return KV_NOT_SHARED;
    if (w->left)
        return c->full ? KV_TRUNCATED : KV_TRUNCATED_LITERAL;
    if (w->n_head >= 9)
        return KV_COPY_RANGE;
    if (w->n_ops)
        return KV_TRUNCATED;
    if (c->excess || c->seen != c->stored || w->pos != c->link_size || c->link_size != c->expected)
        return KV_SIZE_MISMATCH;
    return KV_OK;
}

int kv_chain_end(kv_chain *c)
{
    if (!c->ended) {
        const int rc = check_end(c);
        if (rc != KV_OK)
            return rc;
        kv_range *sorted = sort(c->made, c->ranges, c->n_made);
        if (sorted == c->made) {
            c->made = c->ranges;
            c->ranges = sorted;
        }
        c->n_ranges = c->n_made;
        c->n_made = 0;
        c->ended = 1;
    }
    const uint64_t overlaps = count_overlaps(c->ranges, c->n_ranges);
    if (overlaps > c->repeats_room - c->n_repeats) {
        c->need_repeats = c->n_repeats + overlaps;
        return KV_MORE;
    }
    make_disjoint(c);
    c->ended = 0;
    c->level++;
    c->expected = c->parent_size;
    return KV_OK;
}

void kv_chain_finish(kv_chain *c)
{
    for (uint64_t i = c->n_repeats; i > 0; i--) {
        const kv_range *r = &c->repeats[i - 1];
        memcpy(c->out + r->dst, c->out + r->src, (size_t)r->n);
    }
#if KV_SSE2
    _mm_sfence();
#endif
}
