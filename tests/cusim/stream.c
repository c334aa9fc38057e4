/* Streams and events. A stream is a thread that does one operation after the other; an event counts how often it was
 * recorded (issued) and how often that has happened (done), in memory that other processes can map. */
#include "cusim.h"

struct CUstream_st {
    int device;
    unsigned flags;
    bool started, stopping;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct operation *first, *last;
    uint64_t pushed, finished;
    struct CUstream_st *next;
};
static struct CUstream_st default_streams[MAX_DEVICES], *streams;
static pthread_mutex_t listing = PTHREAD_MUTEX_INITIALIZER; /* of `streams` */

static void perform(const struct operation *operation) {
    if (settings.delay_us) usleep(settings.delay_us);
    struct event_state *event = operation->event;
    char *to = operation->what <= FILL ? reach(operation->to, operation->count) : NULL;
    char *from = operation->what == COPY ? reach(operation->from, operation->count) : to;
    switch (operation->what) {
    case COPY:
    case FILL:
        if (!to || !from) sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        else if (operation->what == COPY) memmove(to, from, operation->count);
        else memset(to, operation->value, operation->count);
        break;
    case RECORD:
        for (uint64_t done = event->done; done < operation->mark;)
            if (atomic_compare_exchange_weak(&event->done, &done, operation->mark)) break;
        break;
    case WAIT:
        while (event->done < operation->mark) usleep(20);
        break;
    case CALL: operation->function(operation->argument); break;
    case FREE: free_memory(operation->to); break;
    }
}

static void *work(void *argument) {
    struct CUstream_st *stream = argument;
    HOLD(&stream->mutex);
    for (;;) {
        while (!stream->first && !stream->stopping) pthread_cond_wait(&stream->changed, &stream->mutex);
        struct operation *operation = stream->first;
        if (!operation) return NULL;
        pthread_mutex_unlock(&stream->mutex);
        perform(operation);
        pthread_mutex_lock(&stream->mutex);
        stream->first = operation->next;
        if (!stream->first) stream->last = NULL;
        free(operation);
        stream->finished++;
        pthread_cond_broadcast(&stream->changed);
    }
}

static void prepare(struct CUstream_st *stream, int device, unsigned flags) {
    *stream = (struct CUstream_st){.device = device, .flags = flags};
    pthread_mutex_init(&stream->mutex, NULL);
    pthread_cond_init(&stream->changed, NULL);
}
void make_default_streams(void) {
    for (int i = 0; i < settings.devices; i++) prepare(&default_streams[i], i, 0);
}
static struct CUstream_st *resolve(CUstream stream) { /* 0, legacy (1) and per-thread (2) are one here */
    return (uintptr_t)stream <= 2 ? &default_streams[current_device()] : stream;
}
static void drain(struct CUstream_st *stream) {
    HOLD(&stream->mutex);
    uint64_t target = stream->pushed;
    while (stream->finished < target) pthread_cond_wait(&stream->changed, &stream->mutex);
}
static void drain_listed(int device, bool blocking_only) {
    HOLD(&listing);
    for (struct CUstream_st *each = streams; each; each = each->next)
        if (each->device == device && !(blocking_only && each->flags & CU_STREAM_NON_BLOCKING)) drain(each);
}
void drain_device(int device) {
    drain(&default_streams[device]);
    drain_listed(device, false);
}

CUresult push(CUstream handle, struct operation operation) {
    struct CUstream_st *stream = resolve(handle), *standard = &default_streams[stream->device];
    if (stream == standard) drain_listed(stream->device, true); /* the legacy default stream and the others wait for */
    else if (!(stream->flags & CU_STREAM_NON_BLOCKING)) drain(standard); /* each other, unless they are non-blocking */
    struct operation *made = malloc(sizeof *made);
    *made = operation;
    HOLD(&stream->mutex);
    if (!stream->started) stream->started = !pthread_create(&stream->thread, NULL, work, stream);
    *(stream->last ? &stream->last->next : &stream->first) = made;
    stream->last = made;
    stream->pushed++;
    pthread_cond_broadcast(&stream->changed);
    return CUDA_SUCCESS;
}
CUresult run_at_once(struct operation operation) {
    push(NULL, operation);
    drain(resolve(NULL));
    return (CUresult)sticky;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTER(CONTEXT);
    struct CUstream_st *made = malloc(sizeof *made);
    prepare(made, current_device(), flags);
    HOLD(&listing);
    made->next = streams;
    *stream = streams = made;
    return CUDA_SUCCESS;
}
static void unlist(struct CUstream_st *stream) {
    HOLD(&listing);
    struct CUstream_st **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
}
static void stop(struct CUstream_st *stream) {
    HOLD(&stream->mutex);
    stream->stopping = true;
    pthread_cond_broadcast(&stream->changed);
}
CUresult cuStreamDestroy(CUstream stream) {
    ENTER(CONTEXT);
    if ((uintptr_t)stream <= 2) return CUDA_ERROR_INVALID_HANDLE;
    unlist(stream);
    stop(stream);
    if (stream->started) pthread_join(stream->thread, NULL);
    free(stream);
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) {
    ENTER(CONTEXT);
    drain(resolve(stream));
    return (CUresult)sticky;
}
CUresult cuStreamQuery(CUstream handle) {
    ENTER(CONTEXT);
    struct CUstream_st *stream = resolve(handle);
    HOLD(&stream->mutex);
    return stream->finished < stream->pushed ? CUDA_ERROR_NOT_READY : (CUresult)sticky;
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
    GIVES(CONTEXT, push(stream, (struct operation){.what = CALL, .function = function, .argument = argument}))

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER(CONTEXT);
    bool shared = flags & CU_EVENT_INTERPROCESS;
    if (shared && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
    int fd = shared ? memfd_create("cusim-event", MFD_CLOEXEC) : -1;
    if (shared && (fd < 0 || ftruncate(fd, 4096))) return CUDA_ERROR_OUT_OF_MEMORY;
    void *state = mmap(NULL, 4096, PROT_READ | PROT_WRITE, shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    if (state == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *event = malloc(sizeof **event);
    **event = (struct CUevent_st){state, fd};
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
    ENTER(CONTEXT);
    if (event->fd >= 0) close(event->fd);
    free(event); /* its page stays: operations in some queue may still use it */
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(CONTEXT);
    uint64_t mark = atomic_fetch_add(&event->state->issued, 1) + 1;
    return push(stream, (struct operation){.what = RECORD, .event = event->state, .mark = mark});
}
CUresult cuEventQuery(CUevent event)
    GIVES(CONTEXT, event->state->done < event->state->issued ? CUDA_ERROR_NOT_READY : (CUresult)sticky)
CUresult cuEventSynchronize(CUevent event) {
    ENTER(CONTEXT);
    for (uint64_t mark = event->state->issued; event->state->done < mark;) usleep(20);
    return (CUresult)sticky;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags; /* what was recorded last at the time of this call is waited for, not what comes after */
    return push(stream, (struct operation){.what = WAIT, .event = event->state, .mark = event->state->issued});
}
