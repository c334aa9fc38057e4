/* Initialisation, devices, contexts, names of errors. */
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
struct counter {
    char name[56];
    _Atomic uint64_t calls;
};
#define COUNTERS 256
static struct counter *counters; /* a file of its own per process, so that a test sees who called */

static void open_counters(void) {
    static struct counter private_ones[COUNTERS];
    counters = private_ones;
    const char *directory = getenv("CUSIM_COUNTS");
    if (!directory) return;
    char path[512];
    snprintf(path, sizeof path, "%s/%d", directory, getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    if (!ftruncate(fd, sizeof private_ones)) {
        void *shared = mmap(NULL, sizeof private_ones, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (shared != MAP_FAILED) counters = shared;
    }
    close(fd);
}

static _Atomic uint64_t *counter_of(const char *function) {
    size_t length = strlen(function);
    const char *version = strstr(function, "_v"); /* cuMemAlloc_v2 is what users call cuMemAlloc */
    if (version) length = version - function;
    static pthread_mutex_t naming = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&naming);
    if (!counters) open_counters();
    struct counter *found = counters;
    while (found < counters + COUNTERS - 1 && found->name[0]) {
        if (strlen(found->name) == length && !strncmp(found->name, function, length)) break;
        found++;
    }
    memcpy(found->name, function, length);
    pthread_mutex_unlock(&naming);
    return &found->calls;
}

static CUresult injected(const char *function, uint64_t calls) {
    const char *rule = getenv("CUSIM_FAIL");
    size_t length = rule ? strcspn(rule, ":") : 0;
    if (!length || strncmp(rule, function, length) || (function[length] && function[length] != '_')) return CUDA_SUCCESS;
    int code = 0;
    unsigned long before = 0;
    sscanf(rule + length, ":%d:%lu", &code, &before);
    return calls >= before ? (CUresult)code : CUDA_SUCCESS;
}

CUresult enter(const char *function, _Atomic uint64_t **counter, enum needs needs) {
    if (!*counter) *counter = counter_of(function);
    uint64_t calls = atomic_fetch_add(*counter, 1);
    CUresult failure = injected(function, calls);
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
    int count = 0, all = number("CUSIM_DEVICES", 1);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int i = 0; i < all && i < MAX_DEVICES; i++) physical_of[count++] = i;
    } else {
        char text[512], *rest = text;
        snprintf(text, sizeof text, "%s", visible);
        for (char *word; (word = strsep(&rest, ",")) && count < MAX_DEVICES;) { /* GPU-4355…: our UUIDs end in the number */
            bool uuid = !strncmp(word, "GPU-", 4) && strlen(word) == 40;
            int device = uuid ? (int)strtol(word + 38, NULL, 16) : *word ? atoi(word) : -1;
            if (device < 0 || device >= all) break; /* as CUDA: what follows a wrong one is not seen */
            physical_of[count++] = device;
        }
    }
    settings.devices = count;
}

CUresult cuInit(unsigned flags) {
    ENTER(NOTHING);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    if (!initialised) {
        see_devices();
        settings.memory = (size_t)number("CUSIM_MEM_MB", 256) << 20;
        settings.delay_us = number("CUSIM_DELAY_US", 0);
        settings.peer = number("CUSIM_PEER", 1);
        for (int i = 0; i < settings.devices; i++) primary[i].device = i;
        if (settings.devices) {
            make_default_streams();
            pthread_atfork(NULL, NULL, after_fork);
            initialised = true;
        }
    }
    pthread_mutex_unlock(&lock);
    return initialised ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    ENTER(NOTHING);
    *version = number("CUSIM_DRIVER_VERSION", 13000);
    return CUDA_SUCCESS;
}

/* --- devices --- */
bool is_device(CUdevice device) { return device >= 0 && device < settings.devices; }
int current_device(void) { return stack[depth - 1]->device; }
int ordinal_of(int physical) {
    for (int i = 0; i < settings.devices; i++)
        if (physical_of[i] == physical) return i;
    return -1;
}
#define ENTER_DEVICE(device)                                     \
    ENTER(INITIALISED);                                          \
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE

CUresult cuDeviceGetCount(int *count) {
    ENTER(INITIALISED);
    *count = settings.devices;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER_DEVICE(device);
    snprintf(name, length, "SIMULATED GPU %d (cusim)", physical_of[device]);
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER_DEVICE(device);
    *bytes = settings.memory;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER_DEVICE(device);
    memset(uuid, 0, sizeof *uuid);
    memcpy(uuid->bytes, "CUSIM", 5);
    uuid->bytes[15] = (char)physical_of[device];
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    ENTER_DEVICE(device);
    snprintf(id, length, "0000:%02x:00.0", physical_of[device] + 1);
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
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = number("CUSIM_INTEGRATED", 0); break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
    default: *value = 0; /* no integrated memory, no cooperative launch, no MIG … */
    }
    return CUDA_SUCCESS;
}

/* --- contexts: primary ones only --- */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER_DEVICE(device);
    pthread_mutex_lock(&lock);
    primary[device].retained++;
    pthread_mutex_unlock(&lock);
    *context = &primary[device];
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER_DEVICE(device);
    pthread_mutex_lock(&lock);
    bool held = primary[device].retained > 0;
    if (held) primary[device].retained--;
    pthread_mutex_unlock(&lock);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER_DEVICE(device);
    *flags = 0;
    *active = primary[device].retained > 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(INITIALISED);
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(INITIALISED);
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(INITIALISED);
    if (!context || depth == sizeof stack / sizeof *stack) return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER(INITIALISED);
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(CONTEXT);
    *device = current_device();
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    ENTER(CONTEXT);
    drain_device(current_device());
    return (CUresult)sticky;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    static __thread char text[48];
    snprintf(text, sizeof text, "CUSIM_ERROR_%d", (int)error); /* bindings know the names: nobody needs them from here */
    *name = text;
    return CUDA_SUCCESS;
}
