/* The parts of the simulated CUDA driver (libcuda.so.1) that its files share. For tests on machines without a GPU.
 *
 * A device's memory is a memfd. Its device address is a range of one PROT_NONE reservation, so a host that dereferences
 * it faults, as with hardware; the simulator itself goes through a second, private mapping. Nothing runs on a device:
 * streams are threads that copy, fill, record, wait and call host functions.
 *
 * Environment, read by cuInit: CUSIM_DEVICES (1), CUSIM_MEM_MB per device and process (256), CUSIM_DELAY_US per stream
 * operation (0), CUSIM_PEER (1: devices reach one another), CUSIM_INTEGRATED (0), CUSIM_DRIVER_VERSION (13000),
 * CUDA_VISIBLE_DEVICES; CUSIM_COUNTS=directory: counters of calls in directory/PID; CUSIM_FAIL=function:code[:calls
 * before it], as in cuMemAlloc:2:3; CUSIM_WITHOUT=function that older drivers lack.
 */
#pragma once
#define _GNU_SOURCE
#pragma GCC visibility push(default) /* what cuda.h declares is exported, nothing else */
#include <cuda.h>
#pragma GCC visibility pop
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/queue.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_DEVICES 8

/* --- device.c: initialisation, devices, contexts --- */
extern struct settings { int devices; size_t memory; unsigned delay_us; bool peer; } settings;
extern int physical_of[MAX_DEVICES]; /* visible ordinal -> simulated device, as CUDA_VISIBLE_DEVICES says */
extern CUresult sticky;              /* of an asynchronous fault: the context is lost, as on hardware */
bool is_device(CUdevice device);
int device_of(CUcontext context);
int current_device(void);

/* Every function of the API begins with ENTER. It holds the lock to the function's end, counts the call and answers for
 * what must be there before it. Whatever takes time is done UNLOCKED. */
extern pthread_mutex_t lock;
enum needs { NOTHING, INITIALISED, CONTEXT };
CUresult enter(const char *function, enum needs needs);
void leave(CUresult *result);
#define ENTER(needs)                                                             \
    __attribute__((cleanup(leave))) CUresult result_ = enter(__func__, (needs)); \
    if (result_ != CUDA_SUCCESS) return result_
#define UNLOCKED(what) (pthread_mutex_unlock(&lock), (what), pthread_mutex_lock(&lock))
/* Whole bodies of such functions: one that does `what`, and one whose result is `result`. */
#define ANSWER(needs, what) { ENTER(needs); what; return CUDA_SUCCESS; }
#define GIVES(needs, result) { ENTER(needs); return (result); }
#define VALID(condition) ((condition) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE)

/* --- memory.c --- */
#define GRANULE ((size_t)2 << 20) /* of VMM allocations, and of this simulator's address space */
#define ROUND_UP(size) (((size) + GRANULE - 1) / GRANULE * GRANULE)
struct memory { /* of a device, while mappings or handles of VMM refer to it */
    int device, fd, references;
    size_t size, charged; /* `charged` to CUSIM_MEM_MB: what another process made costs that one */
};
struct handle { /* the 64 bytes of an IPC handle: /proc/PID/fd/FD must still be the file with this inode */
    uint32_t magic;
    int32_t pid, fd, physical;
    uint64_t inode, size, base;
};
/* What a range of addresses is. PINNED is the host's; RESERVED is for VMM, which may lie in it. */
enum origin { ALLOCATED = 1, POOL = 2, VMM = 4, IMPORTED = 8, ON_DEVICE = 15, RESERVED = 16, PINNED = 32, ANY = 63 };
struct range {
    CUdeviceptr base;
    size_t size;
    enum origin origin;
    struct memory *memory; /* of ON_DEVICE, else NULL; as `bytes`, the private mapping */
    char *bytes;
    struct handle from; /* of IMPORTED, as `opens` */
    int opens;
    LIST_ENTRY(range) link;
};
extern LIST_HEAD(ranges, range) ranges;
struct range *find_range(CUdeviceptr base, size_t size, enum origin origins); /* one that overlaps this; NULL: none */
struct range *add_range(CUdeviceptr base, size_t size, enum origin origin, struct memory *memory);
bool drop_range(CUdeviceptr base, size_t size, enum origin origins); /* false: none begins there and has this size */
#define ANY_SIZE ((size_t)0)
CUdeviceptr free_addresses(size_t size);             /* 0: there are none */
struct memory *make_memory(int device, size_t size); /* NULL: more than CUSIM_MEM_MB */
struct memory *adopt_memory(int device, int fd, size_t size);
void let_go(struct memory *memory);
char *reach(CUdeviceptr pointer, size_t size); /* the host's view of a range; NULL: nobody's memory */

/* --- stream.c --- */
struct CUevent_st { /* a page, which processes share when the event is INTERPROCESS */
    _Atomic uint64_t issued, done;
    int owner, fd; /* the file, -1 without one, of the process that made it */
};
struct operation {
    enum { COPY, FILL, RECORD, WAIT, CALL, FREE } what;
    CUdeviceptr to, from;
    size_t count;
    unsigned char value; /* of FILL */
    CUevent event;
    uint64_t mark; /* of RECORD and WAIT */
    CUhostFn function;
    void *argument;
    CUstream stream; /* this and what follows is for `push` to fill in */
    uint64_t number;
    TAILQ_ENTRY(operation) link;
};
CUresult push(CUstream stream, struct operation operation);
CUresult run_at_once(struct operation operation); /* on the default stream, waiting for it */
void drain_device(void); /* waits for all that the current device was given */
