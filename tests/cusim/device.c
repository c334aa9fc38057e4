/* Initialisation, devices, contexts; counters of calls and injected faults. */
#include "cusim.h"

struct settings settings;
int physical_of[MAX_DEVICES];
_Atomic int sticky;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool initialised, forked;
static struct CUctx_st primary[MAX_DEVICES];
static __thread CUcontext stack[16];
static __thread int depth;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

/* --- counters and faults --- */
#define COUNTERS 128
static struct counter {
    char name[56];
    _Atomic uint64_t calls;
} own_counters[COUNTERS], *counters; /* or those of a file per process, so that a test sees who called */

static void open_counters(void) {
    counters = own_counters;
    if (!getenv("CUSIM_COUNTS")) return;
    char path[512];
    snprintf(path, sizeof path, "%s/%d", getenv("CUSIM_COUNTS"), getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof own_counters)) return;
    void *shared = mmap(NULL, sizeof own_counters, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared != MAP_FAILED) counters = shared;
    close(fd);
}

static _Atomic uint64_t *counter_of(const char *function) {
    static pthread_mutex_t naming = PTHREAD_MUTEX_INITIALIZER;
    HOLD(&naming);
    if (!counters) open_counters();
    const char *version = strstr(function, "_v"); /* cuMemAlloc_v2 is what users call cuMemAlloc */
    size_t length = version ? (size_t)(version - function) : strlen(function);
    struct counter *found = counters;
    while (found->name[0] && (strlen(found->name) != length || strncmp(found->name, function, length))) found++;
    memcpy(found->name, function, length);
    return &found->calls;
}

static CUresult injected(const char *function, uint64_t calls) {
    const char *rule = getenv("CUSIM_FAIL");
    size_t length = rule ? strcspn(rule, ":") : 0;
    int code = 0;
    unsigned long before = 0;
    if (length && !strncmp(rule, function, length) && (!function[length] || function[length] == '_'))
        sscanf(rule + length, ":%d:%lu", &code, &before);
    return calls >= before ? (CUresult)code : CUDA_SUCCESS;
}

CUresult enter(const char *function, _Atomic uint64_t **counter, enum needs needs) {
    if (!*counter) *counter = counter_of(function);
    CUresult failure = injected(function, atomic_fetch_add(*counter, 1));
    if (failure) return failure;
    if (needs >= INITIALISED && !initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs == CONTEXT && !depth) return CUDA_ERROR_INVALID_CONTEXT;
    return needs == CONTEXT ? (CUresult)sticky : CUDA_SUCCESS;
}

/* --- initialisation --- */
static void after_fork(void) { /* a driver that was initialised before fork() is of no use to the child */
    initialised = false;
    forked = true;
    depth = 0;
}

static void see_devices(void) {
    int all = number("CUSIM_DEVICES", 1);
    char text[512] = "0,1,2,3,4,5,6,7", *rest = text;
    if (getenv("CUDA_VISIBLE_DEVICES")) snprintf(text, sizeof text, "%s", getenv("CUDA_VISIBLE_DEVICES"));
    for (char *word; (word = strsep(&rest, ",")) && settings.devices < MAX_DEVICES;) {
        bool uuid = !strncmp(word, "GPU-", 4) && strlen(word) == 40; /* ours end in the device's number */
        int device = uuid ? (int)strtol(word + 38, NULL, 16) : *word ? atoi(word) : -1;
        if (device < 0 || device >= all) break; /* as CUDA: what follows a wrong one is not seen */
        physical_of[settings.devices++] = device;
    }
}

CUresult cuInit(unsigned flags) {
    ENTER(NOTHING);
    HOLD(&lock);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (initialised) return CUDA_SUCCESS;
    size_t memory = (size_t)number("CUSIM_MEM_MB", 256) << 20;
    settings = (struct settings){0, memory, number("CUSIM_DELAY_US", 0), number("CUSIM_PEER", 1)};
    see_devices();
    if (!settings.devices) return CUDA_ERROR_NO_DEVICE;
    for (int i = 0; i < settings.devices; i++) primary[i].device = i;
    make_default_streams();
    pthread_atfork(NULL, NULL, after_fork);
    initialised = true;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) ANSWER(NOTHING, *version = number("CUSIM_DRIVER_VERSION", 13000))

/* --- devices --- */
bool is_device(CUdevice device) { return device >= 0 && device < settings.devices; }
int current_device(void) { return stack[depth - 1]->device; }
#define ENTER_DEVICE(device) \
    ENTER(INITIALISED);      \
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE
#define ANSWER_OF(device, what) { ENTER_DEVICE(device); what; return CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) ANSWER(INITIALISED, *count = settings.devices)
CUresult cuDeviceGet(CUdevice *device, int ordinal) ANSWER_OF(ordinal, *device = ordinal)
CUresult cuDeviceGetName(char *name, int length, CUdevice device)
    ANSWER_OF(device, snprintf(name, length, "SIMULATED GPU %d (cusim)", physical_of[device]))
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) ANSWER_OF(device, *bytes = settings.memory)
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER_DEVICE(device);
    memcpy(uuid->bytes, "CUSIM\0\0\0\0\0\0\0\0\0\0", 16);
    uuid->bytes[15] = (char)physical_of[device];
    return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER_DEVICE(device);
    if (!is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer && settings.peer;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER_DEVICE(device);
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = number("CUSIM_INTEGRATED", 0); break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
    default: *value = 0; /* nothing else is there */
    }
    return CUDA_SUCCESS;
}

/* --- contexts: primary ones only --- */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER_DEVICE(device);
    HOLD(&lock);
    primary[device].retained++;
    *context = &primary[device];
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER_DEVICE(device);
    *flags = 0;
    *active = primary[device].retained > 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) ANSWER(INITIALISED, *context = depth ? stack[depth - 1] : NULL)
CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(INITIALISED);
    if (!context || depth == sizeof stack / sizeof *stack) return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    ENTER(CONTEXT);
    drain_device(current_device());
    return (CUresult)sticky;
}
CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(INITIALISED);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}
