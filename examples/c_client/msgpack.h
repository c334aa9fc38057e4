/* As much of msgpack as the protocol needs: maps, arrays, text, bytes, integers. Header only, no allocation. */
#ifndef TENSORBROKER_MSGPACK_H
#define TENSORBROKER_MSGPACK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* --- writing: into a buffer of fixed size; `overflow` is set once something did not fit --- */

typedef struct {
    uint8_t *data;
    size_t size, capacity;
    int overflow;
} mp_writer;

static inline void mp_raw(mp_writer *w, const void *data, size_t size) {
    if (w->overflow || size > w->capacity - w->size) {
        w->overflow = 1;
        return;
    }
    memcpy(w->data + w->size, data, size);
    w->size += size;
}

/* `head` and then `value` in `bytes` bytes, big-endian. */
static inline void mp_head(mp_writer *w, uint8_t head, uint64_t value, int bytes) {
    uint8_t out[9];
    out[0] = head;
    for (int i = 0; i < bytes; i++)
        out[1 + i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    mp_raw(w, out, 1 + (size_t)bytes);
}

static inline void mp_map(mp_writer *w, unsigned count) { /* at most 65,535 entries */
    if (count < 16)
        mp_head(w, (uint8_t)(0x80 | count), 0, 0);
    else
        mp_head(w, 0xde, count, 2);
}

static inline void mp_array(mp_writer *w, unsigned count) { /* at most 65,535 elements */
    if (count < 16)
        mp_head(w, (uint8_t)(0x90 | count), 0, 0);
    else
        mp_head(w, 0xdc, count, 2);
}

static inline void mp_uint(mp_writer *w, uint64_t value) {
    if (value < 128)
        mp_head(w, (uint8_t)value, 0, 0);
    else
        mp_head(w, 0xcf, value, 8);
}

static inline void mp_text(mp_writer *w, const char *text) {
    size_t size = strlen(text);
    if (size < 32)
        mp_head(w, (uint8_t)(0xa0 | size), 0, 0);
    else
        mp_head(w, 0xdb, size, 4);
    mp_raw(w, text, size);
}

static inline void mp_bytes(mp_writer *w, const void *data, size_t size) {
    mp_head(w, 0xc6, size, 4);
    mp_raw(w, data, size);
}

/* --- reading: a cursor over a message; `bad` is set once something was not what was asked for --- */

typedef struct {
    const uint8_t *at, *end;
    int bad;
} mp_reader;

static inline uint64_t mp_take(mp_reader *r, int bytes) {
    uint64_t value = 0;
    if (r->bad || r->end - r->at < bytes) {
        r->bad = 1;
        return 0;
    }
    for (int i = 0; i < bytes; i++)
        value = value << 8 | *r->at++;
    return value;
}

/* The entries of a map (kind 0x80) or the elements of an array (kind 0x90) that follow. */
static inline uint64_t mp_read_count(mp_reader *r, uint8_t kind) {
    uint8_t head = (uint8_t)mp_take(r, 1);
    uint8_t wide = kind == 0x80 ? 0xde : 0xdc;
    if ((head & 0xf0) == kind)
        return head & 0x0f;
    if (head == wide)
        return mp_take(r, 2);
    if (head == wide + 1)
        return mp_take(r, 4);
    r->bad = 1;
    return 0;
}

static inline uint64_t mp_read_uint(mp_reader *r) {
    uint8_t head = (uint8_t)mp_take(r, 1);
    if (head < 0x80)
        return head;
    if (head >= 0xcc && head <= 0xcf)
        return mp_take(r, 1 << (head - 0xcc));
    r->bad = 1;
    return 0;
}

/* Text or bytes: a view into the message, not terminated by a zero. */
static inline const char *mp_read_view(mp_reader *r, size_t *size) {
    uint8_t head = (uint8_t)mp_take(r, 1);
    if ((head & 0xe0) == 0xa0)
        *size = head & 0x1f;
    else if (head >= 0xd9 && head <= 0xdb)
        *size = (size_t)mp_take(r, 1 << (head - 0xd9));
    else if (head >= 0xc4 && head <= 0xc6)
        *size = (size_t)mp_take(r, 1 << (head - 0xc4));
    else
        r->bad = 1;
    if (r->bad || *size > (size_t)(r->end - r->at)) {
        r->bad = 1;
        *size = 0;
        return "";
    }
    r->at += *size;
    return (const char *)r->at - *size;
}

/* Pass over one value of any kind, with all that is inside it. */
static inline void mp_skip(mp_reader *r) {
    uint64_t left = 1; /* values still to pass over: no recursion, whatever the message says */
    while (left > 0 && !r->bad) {
        uint8_t head;
        size_t size;
        left--;
        if (r->at == r->end) {
            r->bad = 1;
            return;
        }
        head = *r->at;
        if ((head & 0xf0) == 0x80 || head == 0xde || head == 0xdf)
            left += 2 * mp_read_count(r, 0x80);
        else if ((head & 0xf0) == 0x90 || head == 0xdc || head == 0xdd)
            left += mp_read_count(r, 0x90);
        else if ((head & 0xe0) == 0xa0 || (head >= 0xd9 && head <= 0xdb) || (head >= 0xc4 && head <= 0xc6))
            mp_read_view(r, &size);
        else if (head < 0x80 || head >= 0xe0 || head == 0xc0 || head == 0xc2 || head == 0xc3)
            mp_take(r, 1);
        else if (head >= 0xcc && head <= 0xd3) /* integers */
            mp_take(r, 1), mp_take(r, 1 << ((head - 0xcc) & 3));
        else if (head == 0xca || head == 0xcb) /* floats */
            mp_take(r, 1), mp_take(r, head == 0xca ? 4 : 8);
        else
            r->bad = 1;
    }
}

/* In a map of `count` entries at `r`: moves to the value of `key`. 0 if there is none. */
static inline int mp_find(mp_reader *r, uint64_t count, const char *key) {
    while (count-- > 0 && !r->bad) {
        size_t size;
        const char *found = mp_read_view(r, &size);
        if (size == strlen(key) && memcmp(found, key, size) == 0)
            return !r->bad;
        mp_skip(r);
    }
    return 0;
}

#endif
