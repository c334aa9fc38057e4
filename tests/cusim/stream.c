/* Streams and events. A stream is a thread that does one operation after the other; an event counts how often it was
 * recorded (issued) and how often that has happened (done), in memory that other processes can map. */
#include "cusim.h"

struct CUstream_st {
    int device;
    bool is_default, non_blocking, gathers, ended;
};
static TAILQ_HEAD(, operation) operations = TAILQ_HEAD_INITIALIZER(operations); /* of all streams, in their order */
static uint64_t pushed;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* Has a stream (NULL: any of the current device) something to do of what was pushed up to operation `number`? */
static bool is_busy(const struct CUstream_st *stream, uint64_t number) {
    struct operation *each;
    TAILQ_FOREACH(each, &operations, link) {
        bool meant = stream ? each->stream == stream : each->stream->device == current_device();
        if (meant && each->number <= number) return true;
    }
    return false;
}
static void drain(const struct CUstream_st *stream) {
    for (uint64_t number = pushed; is_busy(stream, number);) pthread_cond_wait(&changed, &lock);
}
void drain_device(void) { drain(NULL); }

/* What a stream is to do now. The legacy default stream and the others of its device wait for each other, unless those
 * are non-blocking. One that gathers waits for all of its device, and nobody for it. */
static struct operation *next_of(const struct CUstream_st *stream) {
    struct operation *each;
    TAILQ_FOREACH(each, &operations, link) {
        const struct CUstream_st *other = each->stream;
        if (other == stream) return each;
        if (stream->gathers && other->device == stream->device) return NULL;
        bool ordered = other->is_default != stream->is_default && !other->non_blocking && !stream->non_blocking;
        if (ordered && other->device == stream->device) return NULL;
    }
    return NULL;
}
static void await(CUevent event, uint64_t mark) {
    while (event->done < mark) UNLOCKED(usleep(20)); /* it may be another process that records it */
}
static void perform(const struct operation *operation) {
    if (settings.delay_us) UNLOCKED(usleep(settings.delay_us));
    CUevent event = operation->event;
    char *to = operation->what <= FILL ? reach(operation->to, operation->count) : NULL;
    char *from = operation->what == COPY ? reach(operation->from, operation->count) : to;
    switch (operation->what) {
    case COPY:
    case FILL:
        if (!to || !from) sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        else if (operation->what == COPY) UNLOCKED(memmove(to, from, operation->count));
        else UNLOCKED(memset(to, operation->value, operation->count));
        break;
    case RECORD:
        if (event->done < operation->mark) event->done = operation->mark;
        break;
    case WAIT: await(event, operation->mark); break;
    case CALL: UNLOCKED(operation->function(operation->argument)); break;
    case FREE: drop_range(operation->to, ANY_SIZE, ALLOCATED | POOL); break;
    }
}
static void *work(void *argument) {
    struct CUstream_st *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct operation *next;
        while (!(next = next_of(stream)) && !stream->ended) pthread_cond_wait(&changed, &lock);
        if (!next) break;
        perform(next);
        TAILQ_REMOVE(&operations, next, link);
        free(next);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    free(stream);
    return NULL;
}

static struct CUstream_st *make_stream(struct CUstream_st stream) {
    struct CUstream_st *made = malloc(sizeof *made);
    *made = stream;
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, made) || pthread_detach(thread)) abort(); /* the host's fault, no test's */
    return made;
}
static struct CUstream_st *resolve(CUstream handle) { /* 0, legacy (1) and per-thread (2) are one here */
    static struct CUstream_st *defaults[MAX_DEVICES];
    if ((uintptr_t)handle > 2) return handle;
    struct CUstream_st **standard = &defaults[current_device()];
    return *standard ? *standard : (*standard = make_stream((struct CUstream_st){current_device(), .is_default = true}));
}
static struct CUstream_st *gatherer_of(int device) {
    static struct CUstream_st *gatherers[MAX_DEVICES];
    struct CUstream_st **one = &gatherers[device];
    return *one ? *one : (*one = make_stream((struct CUstream_st){device, .non_blocking = true, .gathers = true}));
}
CUresult push(CUstream stream, struct operation operation) {
    struct operation *made = malloc(sizeof *made);
    *made = operation;
    made->stream = resolve(stream);
    made->number = ++pushed;
    TAILQ_INSERT_TAIL(&operations, made, link);
    pthread_cond_broadcast(&changed);
    return CUDA_SUCCESS;
}
CUresult run_at_once(struct operation operation) {
    push(NULL, operation);
    drain(resolve(NULL));
    return sticky;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
    ANSWER(CONTEXT, *stream = make_stream((struct CUstream_st){current_device(), .non_blocking = flags & CU_STREAM_NON_BLOCKING}))
CUresult cuStreamDestroy(CUstream stream) {
    ENTER(CONTEXT);
    if ((uintptr_t)stream <= 2) return CUDA_ERROR_INVALID_HANDLE;
    drain(stream);
    stream->ended = true; /* its thread frees it */
    pthread_cond_broadcast(&changed);
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) GIVES(CONTEXT, (drain_device(), sticky))
CUresult cuStreamSynchronize(CUstream stream) GIVES(CONTEXT, (drain(resolve(stream)), sticky))
CUresult cuStreamQuery(CUstream stream) GIVES(CONTEXT, is_busy(resolve(stream), pushed) ? CUDA_ERROR_NOT_READY : sticky)
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
    GIVES(CONTEXT, push(stream, (struct operation){.what = CALL, .function = function, .argument = argument}))

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER(CONTEXT);
    bool shared = flags & CU_EVENT_INTERPROCESS;
    if (shared && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
    int fd = shared ? memfd_create("cusim-event", MFD_CLOEXEC) : -1;
    *event = mmap(NULL, sizeof **event, PROT_READ | PROT_WRITE, MAP_SHARED | (shared ? 0 : MAP_ANONYMOUS), fd, 0);
    if (*event == MAP_FAILED || (shared && ftruncate(fd, sizeof **event))) return CUDA_ERROR_OUT_OF_MEMORY;
    **event = (struct CUevent_st){.owner = getpid(), .fd = fd};
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) { /* its page stays: operations in some queue may still use it */
    ENTER(CONTEXT);
    if (event->owner == getpid() && event->fd >= 0) close(event->fd);
    return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream)
    GIVES(CONTEXT, push(stream, (struct operation){.what = RECORD, .event = event, .mark = ++event->issued}))
CUresult cuCtxRecordEvent(CUcontext context, CUevent event) {
    ENTER(INITIALISED);
    int device = device_of(context);
    if (!is_device(device)) return CUDA_ERROR_INVALID_CONTEXT;
    return push(gatherer_of(device), (struct operation){.what = RECORD, .event = event, .mark = ++event->issued});
}
CUresult cuEventQuery(CUevent event) GIVES(CONTEXT, event->done < event->issued ? CUDA_ERROR_NOT_READY : sticky)
CUresult cuEventSynchronize(CUevent event) GIVES(CONTEXT, (await(event, event->issued), sticky))
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) /* for the latest record, none that comes */
    GIVES(CONTEXT, push(stream, (struct operation){.what = WAIT, .event = event, .mark = event->issued}))
