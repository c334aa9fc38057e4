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

static void perform(struct operation *operation) {
    if (settings.delay_us) usleep(settings.delay_us);
    size_t size = operation->what == FILL ? operation->count * operation->width : operation->count;
    char *to = operation->to ? reach(operation->to, size) : NULL;
    switch (operation->what) {
    case COPY: {
        char *from = reach(operation->from, size);
        if (to && from) memmove(to, from, size);
        else if (size) sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        break;
    }
    case FILL:
        if (!to) sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        else if (operation->width == 1) memset(to, (int)operation->value, size);
        else for (size_t i = 0; i < size; i += operation->width) memcpy(to + i, &operation->value, operation->width);
        break;
    case RECORD: {
        uint64_t done = operation->event->done;
        while (done < operation->mark && !atomic_compare_exchange_weak(&operation->event->done, &done, operation->mark)) {}
        break;
    }
    case WAIT:
        while (operation->event->done < operation->mark) usleep(20);
        break;
    case CALL: operation->function(operation->argument); break;
    case FREE: free_from_pool(operation->to); break;
    }
}

static void *work(void *argument) {
    struct CUstream_st *stream = argument;
    pthread_mutex_lock(&stream->mutex);
    for (;;) {
        while (!stream->first && !stream->stopping) pthread_cond_wait(&stream->changed, &stream->mutex);
        struct operation *operation = stream->first;
        if (!operation) break;
        pthread_mutex_unlock(&stream->mutex);
        perform(operation);
        pthread_mutex_lock(&stream->mutex);
        stream->first = operation->next;
        if (!stream->first) stream->last = NULL;
        free(operation);
        stream->finished++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->mutex);
    return NULL;
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
    pthread_mutex_lock(&stream->mutex);
    uint64_t target = stream->pushed;
    while (stream->finished < target) pthread_cond_wait(&stream->changed, &stream->mutex);
    pthread_mutex_unlock(&stream->mutex);
}
static void drain_listed(int device, bool blocking_only) {
    pthread_mutex_lock(&listing);
    for (struct CUstream_st *each = streams; each; each = each->next)
        if (each->device == device && !(blocking_only && each->flags & CU_STREAM_NON_BLOCKING)) drain(each);
    pthread_mutex_unlock(&listing);
}
void drain_device(int device) {
    drain(&default_streams[device]);
    drain_listed(device, false);
}

void push(CUstream handle, struct operation operation) {
    struct CUstream_st *stream = resolve(handle), *standard = &default_streams[stream->device];
    if (stream == standard) drain_listed(stream->device, true); /* the legacy default stream and the others wait for */
    else if (!(stream->flags & CU_STREAM_NON_BLOCKING)) drain(standard); /* each other, unless they are non-blocking */
    struct operation *made = malloc(sizeof *made);
    *made = operation;
    pthread_mutex_lock(&stream->mutex);
    if (!stream->started) stream->started = !pthread_create(&stream->thread, NULL, work, stream);
    if (stream->last) stream->last->next = made;
    else stream->first = made;
    stream->last = made;
    stream->pushed++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
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
    pthread_mutex_lock(&listing);
    made->next = streams;
    streams = made;
    pthread_mutex_unlock(&listing);
    *stream = made;
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
    ENTER(CONTEXT);
    if ((uintptr_t)stream <= 2) return CUDA_ERROR_INVALID_HANDLE;
    drain(stream);
    pthread_mutex_lock(&listing);
    struct CUstream_st **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    pthread_mutex_unlock(&listing);
    pthread_mutex_lock(&stream->mutex);
    stream->stopping = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
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
    pthread_mutex_lock(&stream->mutex);
    bool busy = stream->finished < stream->pushed;
    pthread_mutex_unlock(&stream->mutex);
    return busy ? CUDA_ERROR_NOT_READY : (CUresult)sticky;
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    ENTER(CONTEXT);
    push(stream, (struct operation){.what = CALL, .function = function, .argument = argument});
    return CUDA_SUCCESS;
}

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
    push(stream, (struct operation){.what = RECORD, .event = event->state, .mark = mark});
    return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
    ENTER(CONTEXT);
    return event->state->done < event->state->issued ? CUDA_ERROR_NOT_READY : (CUresult)sticky;
}
CUresult cuEventSynchronize(CUevent event) {
    ENTER(CONTEXT);
    uint64_t mark = event->state->issued;
    while (event->state->done < mark) usleep(20);
    return (CUresult)sticky;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags; /* what was recorded last at the time of this call is waited for, not what comes after */
    push(stream, (struct operation){.what = WAIT, .event = event->state, .mark = event->state->issued});
    return CUDA_SUCCESS;
}
