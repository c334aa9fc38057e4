/* The parts of the simulated CUDA driver (libcuda.so.1) that its files share. For tests on machines without a GPU.
 *
 * A device's memory is a memfd. Its device address is a range of one PROT_NONE reservation, so a host that dereferences
 * it faults, as with hardware; the simulator itself goes through a second, private mapping. Nothing runs on a device:
 * streams are threads that copy, fill, record, wait and call host functions.
 *
 * Environment, read by cuInit: CUSIM_DEVICES (1), CUSIM_MEM_MB per device and process (256), CUSIM_DELAY_US per stream
 * operation (0), CUSIM_PEER (1: devices reach one another), CUSIM_INTEGRATED (0), CUSIM_DRIVER_VERSION (13000),
 * CUDA_VISIBLE_DEVICES; CUSIM_COUNTS=directory: counters of calls in directory/PID; CUSIM_FAIL=function:code[:calls
 * before it], as in cuMemAlloc:2:3.
 */
#ifndef CUSIM_H
#define CUSIM_H
#define _GNU_SOURCE
#pragma GCC visibility push(default) /* what cuda.h declares is exported, nothing else */
#include <cuda.h>
#pragma GCC visibility pop
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_DEVICES 8
#define GRANULE ((size_t)2 << 20) /* of VMM allocations, and of this simulator's address space */
#define ROUND_UP(size) (((size) + GRANULE - 1) / GRANULE * GRANULE)

/* --- device.c: initialisation, devices, contexts --- */
struct settings {
    int devices;
    size_t memory;
    long delay_us;
    bool peer;
};
struct CUctx_st {
    int device, retained;
};
extern struct settings settings;
extern int physical_of[MAX_DEVICES]; /* visible ordinal -> simulated device, as CUDA_VISIBLE_DEVICES says */
extern _Atomic int sticky; /* CUresult of an asynchronous fault: the context is lost, as on hardware */
extern pthread_mutex_t lock; /* of everything but streams */

enum needs { NOTHING, INITIALISED, CONTEXT };
CUresult enter(const char *function, _Atomic uint64_t **counter, enum needs needs);
bool is_device(CUdevice device);
int current_device(void);
/* First statement of every function of the API: counts the call and answers for what must be there before it. */
#define ENTER(needs)                                                   \
    do {                                                               \
        static _Atomic uint64_t *counter_;                             \
        CUresult result_ = enter(__func__, &counter_, (needs));        \
        if (result_ != CUDA_SUCCESS) return result_;                   \
    } while (0)
/* Whole bodies of such functions: one that does `what`, and one whose result is `result`. */
#define ANSWER(needs, what) { ENTER(needs); what; return CUDA_SUCCESS; }
#define GIVES(needs, result) { ENTER(needs); return (result); }
/* Holds a mutex to the end of the block. */
#define HOLD(mutex) __attribute__((cleanup(let_go_of), unused)) pthread_mutex_t *held_ = take(mutex)
static inline pthread_mutex_t *take(pthread_mutex_t *mutex) { return pthread_mutex_lock(mutex), mutex; }
static inline void let_go_of(pthread_mutex_t **mutex) { pthread_mutex_unlock(*mutex); }

/* --- memory.c; all but `reach` and `free_from_pool` with `lock` held --- */
struct handle { /* the 64 bytes of an IPC handle: /proc/PID/fd/FD must still be the file with this inode */
    uint32_t magic;
    int32_t pid, fd, physical;
    uint64_t inode, size, base;
};
struct allocation {
    CUdeviceptr base;
    size_t size;
    char *bytes; /* the private mapping */
    int device, fd, opens;
    enum origin { ALLOCATED, IMPORTED, VMM, POOL } origin;
    struct handle from;        /* of IMPORTED */
    struct physical *physical; /* of VMM */
    struct allocation *next;
};
extern struct allocation *allocations;
struct allocation *find_allocation(CUdeviceptr pointer);
struct allocation *add_allocation(enum origin origin, int device, int fd, CUdeviceptr base, size_t size, char *bytes);
void drop_allocation(struct allocation *allocation);
CUdeviceptr take_addresses(size_t size); /* 0: none left; the lowest free range, so that addresses are used again */
void give_addresses(CUdeviceptr base, size_t size);
char *map_file(int fd, size_t size);
int make_memory(int device, size_t size); /* a memfd that is charged to the device, or -1: more than CUSIM_MEM_MB */
void discharge(int device, size_t size);
char *reach(CUdeviceptr pointer, size_t size); /* the host's view of a range; NULL: nobody's memory */
CUresult free_memory(CUdeviceptr pointer);

/* --- stream.c --- */
struct event_state { /* in memory that processes share when the event is INTERPROCESS */
    _Atomic uint64_t issued, done;
};
struct CUevent_st {
    struct event_state *state;
    int fd;
};
struct operation {
    enum { COPY, FILL, RECORD, WAIT, CALL, FREE } what;
    CUdeviceptr to, from;
    size_t count;
    unsigned char value; /* of FILL */
    struct event_state *event;
    uint64_t mark; /* of RECORD and WAIT */
    CUhostFn function;
    void *argument;
    struct operation *next;
};
void make_default_streams(void);
CUresult push(CUstream stream, struct operation operation);
CUresult run_at_once(struct operation operation); /* on the default stream, waiting for it */
void drain_device(int device);
#endif
