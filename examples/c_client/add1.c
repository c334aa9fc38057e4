/* Runs the model "add1" (FP32 [-1, 4]: y = x + 1) on POSIX shared memory, by the protocol of docs/wire-protocol.md.

       make && ./add1 /run/directory/of/the/broker

   Prints the four results. Exit codes: 0 done, 1 something failed (and what), 2 wrong usage. */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<zmq.h>)
#include <zmq.h>
#else
#include "zmq_abi.h"
#endif
#else
#include "zmq_abi.h"
#endif

#include "msgpack.h"

#define TIMEOUT_MS 10000
#define REGION_SIZE 4096
#define OUTPUT_OFFSET 64
#define TENSOR_SIZE (4 * sizeof(float))

static void *context, *gateway;
static char region_key[64];

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    if (region_key[0])
        shm_unlink(region_key);
    exit(1);
}

/* --- asking: one request, one reply --- */

static uint8_t message[65536], reply[65536];
static uint64_t last_id;

/* Begins a message of `fields` fields besides "type" and "id". */
static mp_writer begin(const char *type, unsigned fields) {
    mp_writer w = {message, 0, sizeof message, 0};
    mp_map(&w, 2 + fields);
    mp_text(&w, "type");
    mp_text(&w, type);
    mp_text(&w, "id");
    mp_uint(&w, ++last_id);
    return w;
}

/* Sends it and returns a reader of the reply's fields, in `*count`. A reply that is an error ends the program. */
static mp_reader ask(const char *what, mp_writer *w, uint64_t *count) {
    mp_reader r, fields;
    const char *text;
    size_t size;
    int received;

    if (w->overflow)
        fail(what, "the message is too large");
    if (zmq_send(gateway, w->data, w->size, 0) < 0)
        fail(what, "no gateway listens there");
    received = zmq_recv(gateway, reply, sizeof reply, 0);
    if (received < 0)
        fail(what, zmq_strerror(zmq_errno()));
    if ((size_t)received > sizeof reply)
        fail(what, "the reply is too large");

    r.at = reply, r.end = reply + received, r.bad = 0;
    *count = mp_read_count(&r, 0x80);
    fields = r;
    if (!mp_find(&r, *count, "id") || mp_read_uint(&r) != last_id)
        fail(what, "a reply to something else");
    r = fields;
    if (!mp_find(&r, *count, "type"))
        fail(what, "a reply without a type");
    text = mp_read_view(&r, &size);
    if (size == 5 && memcmp(text, "error", 5) == 0) {
        char why[512];
        r = fields;
        if (!mp_find(&r, *count, "message"))
            fail(what, "an error without a message");
        text = mp_read_view(&r, &size);
        snprintf(why, sizeof why, "%.*s", (int)(size < sizeof why ? size : sizeof why - 1), text);
        fail(what, why);
    }
    return fields;
}

/* --- the steps --- */

static void hello(void) {
    uint64_t count;
    mp_writer w = begin("hello", 2);
    mp_reader r;
    size_t size;
    mp_text(&w, "protocol");
    mp_uint(&w, 1);
    /* A program that is silent for longer than three times this says hello again, with the token. */
    mp_text(&w, "heartbeat_ms");
    mp_uint(&w, 10000);
    r = ask("hello", &w, &count);
    if (!mp_find(&r, count, "token") || (mp_read_view(&r, &size), size != 32))
        fail("hello", "no token in the welcome");
}

static void register_region(const char *name, const char *key, uint64_t byte_size) {
    uint64_t count;
    mp_writer w = begin("register", 3);
    mp_text(&w, "name");
    mp_text(&w, name);
    mp_text(&w, "key");
    mp_text(&w, key);
    mp_text(&w, "byte_size");
    mp_uint(&w, byte_size);
    ask("register", &w, &count);
}

/* A tensor that lies in a region: part of an input or output. */
static void place(mp_writer *w, const char *region, uint64_t offset, uint64_t byte_size) {
    mp_text(w, "region");
    mp_text(w, region);
    mp_text(w, "offset");
    mp_uint(w, offset);
    mp_text(w, "byte_size");
    mp_uint(w, byte_size);
}

static void infer(const char *region) {
    uint64_t count;
    mp_writer w = begin("infer", 3);
    mp_text(&w, "model");
    mp_text(&w, "add1");
    mp_text(&w, "inputs");
    mp_array(&w, 1);
    mp_map(&w, 6);
    mp_text(&w, "name");
    mp_text(&w, "x");
    mp_text(&w, "datatype");
    mp_text(&w, "FP32");
    mp_text(&w, "shape");
    mp_array(&w, 2);
    mp_uint(&w, 1);
    mp_uint(&w, 4);
    place(&w, region, 0, TENSOR_SIZE);
    mp_text(&w, "outputs");
    mp_array(&w, 1);
    mp_map(&w, 4);
    mp_text(&w, "name");
    mp_text(&w, "y");
    place(&w, region, OUTPUT_OFFSET, TENSOR_SIZE);
    ask("infer", &w, &count);
}

static void unregister(const char *name) {
    uint64_t count;
    mp_writer w = begin("unregister", 1);
    mp_text(&w, "name");
    mp_text(&w, name);
    ask("unregister", &w, &count);
}

static void goodbye(void) {
    uint64_t count;
    mp_writer w = begin("goodbye", 0);
    ask("goodbye", &w, &count);
}

static uint8_t *make_region(void) {
    uint8_t *memory;
    int fd;
    snprintf(region_key, sizeof region_key, "/add1.%ld", (long)getpid());
    fd = shm_open(region_key, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0) {
        region_key[0] = 0;
        fail("shm_open", "cannot make shared memory");
    }
    if (posix_fallocate(fd, 0, REGION_SIZE) != 0)
        fail("posix_fallocate", "no memory");
    memory = mmap(NULL, REGION_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        fail("mmap", "cannot map shared memory");
    close(fd);
    return memory;
}

int main(int argc, char **argv) {
    int timeout = TIMEOUT_MS, zero = 0;
    char endpoint[256];
    uint8_t *memory;
    float *x, *y;

    if (argc != 2) {
        fprintf(stderr, "usage: %s RUN_DIRECTORY\n", argv[0]);
        return 2;
    }
    snprintf(endpoint, sizeof endpoint, "ipc://%s/zmq.sock", argv[1]);
    context = zmq_ctx_new();
    gateway = zmq_socket(context, ZMQ_DEALER);
    zmq_setsockopt(gateway, ZMQ_SNDTIMEO, &timeout, sizeof timeout);
    zmq_setsockopt(gateway, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    zmq_setsockopt(gateway, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(gateway, ZMQ_IMMEDIATE, &(int){1}, sizeof(int));
    if (zmq_connect(gateway, endpoint) != 0)
        fail(endpoint, zmq_strerror(zmq_errno()));

    memory = make_region();
    x = (float *)memory;
    y = (float *)(memory + OUTPUT_OFFSET);
    for (int i = 0; i < 4; i++)
        x[i] = (float)i;

    hello();
    register_region("tensors", region_key, REGION_SIZE);
    infer("tensors"); /* the result lies in our memory when the reply comes */
    printf("%g %g %g %g\n", y[0], y[1], y[2], y[3]);
    unregister("tensors");
    goodbye();

    shm_unlink(region_key);
    munmap(memory, REGION_SIZE);
    zmq_close(gateway);
    zmq_ctx_term(context);
    return 0;
}
