/* Initialisation, devices, contexts; which functions there are; counters of calls and injected faults. */
#include "cusim.h"

struct settings settings;
int physical_of[MAX_DEVICES];
CUresult sticky;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static enum { NEW, INITIALISED_HERE, FORKED } state;
static struct CUctx_st { bool retained; } primary[MAX_DEVICES]; /* the contexts there are */
static __thread CUcontext stack[16];
static __thread int depth;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

/* --- counters and faults --- */
#define COUNTERS 128
static struct counter {
    char name[56];
    uint64_t calls;
} *counters; /* in a file per process, so that a test sees who called */

static void open_counters(void) {
    const char *directory = getenv("CUSIM_COUNTS");
    char path[512];
    snprintf(path, sizeof path, "%s/%d", directory ? directory : "", getpid());
    int fd = directory ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : memfd_create("cusim-counts", MFD_CLOEXEC);
    if (ftruncate(fd, COUNTERS * sizeof *counters)) abort();
    counters = mmap(NULL, COUNTERS * sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
}

static CUresult injected(const char *function, uint64_t calls) {
    const char *rule = getenv("CUSIM_FAIL");
    size_t length = strlen(function);
    int code = 0;
    unsigned long before = 0;
    if (rule && !strncmp(rule, function, length)) sscanf(rule + length, ":%d:%lu", &code, &before);
    return calls >= before ? (CUresult)code : CUDA_SUCCESS;
}

CUresult enter(const char *function, enum needs needs) {
    pthread_mutex_lock(&lock);
    char name[sizeof counters->name];
    snprintf(name, sizeof name, "%s", function);
    name[strcspn(name, "_")] = 0; /* cuMemAlloc_v2 is what users call cuMemAlloc */
    if (!counters) open_counters();
    struct counter *counter = counters;
    while (counter->name[0] && strcmp(counter->name, name)) counter++;
    strcpy(counter->name, name);
    CUresult failure = injected(name, counter->calls++);
    if (failure) return failure;
    if (needs >= INITIALISED && state != INITIALISED_HERE) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs == CONTEXT && !depth) return CUDA_ERROR_INVALID_CONTEXT;
    return needs == CONTEXT ? sticky : CUDA_SUCCESS;
}
void leave(CUresult *result) { pthread_mutex_unlock(&lock); }

/* --- initialisation --- */
static void after_fork(void) { /* a driver that was initialised before fork() is of no use to the child */
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* its holder may have been a thread that is not here */
    state = FORKED;
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
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (state != NEW) return state == FORKED ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
    size_t memory = (size_t)number("CUSIM_MEM_MB", 256) << 20;
    settings = (struct settings){0, memory, (unsigned)number("CUSIM_DELAY_US", 0), number("CUSIM_PEER", 1)};
    see_devices();
    if (!settings.devices) return CUDA_ERROR_NO_DEVICE;
    pthread_atfork(NULL, NULL, after_fork);
    state = INITIALISED_HERE;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) ANSWER(NOTHING, *version = number("CUSIM_DRIVER_VERSION", 13000))

/* Bindings look every function up by the name without a version. `cuda.h` turned the names here into the newest one,
 * the second of each that has versions. What is not here is "not found", never a stub that succeeds. */
CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    char newest[128];
    snprintf(newest, sizeof newest, "%s_v2", name);
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD); /* this one */
    *function = dlsym(library, newest);
    if (!*function) *function = dlsym(library, name);
    const char *without = getenv("CUSIM_WITHOUT");
    if (without && !strcmp(without, name)) *function = NULL;
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* --- devices --- */
bool is_device(CUdevice device) { return device >= 0 && device < settings.devices; }
int device_of(CUcontext context) { return (int)(context - primary); }
int current_device(void) { return device_of(stack[depth - 1]); }
#define ANSWER_OF(device, what) \
    { ENTER(INITIALISED); if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE; what; return CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) ANSWER(INITIALISED, *count = settings.devices)
CUresult cuDeviceGet(CUdevice *device, int ordinal) ANSWER_OF(ordinal, *device = ordinal)
CUresult cuDeviceGetName(char *name, int length, CUdevice device)
    ANSWER_OF(device, snprintf(name, (size_t)length, "SIMULATED GPU %d (cusim)", physical_of[device]))
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) ANSWER_OF(device, *bytes = settings.memory)
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
    ANSWER_OF(device, memcpy(uuid->bytes, "CUSIM\0\0\0\0\0\0\0\0\0\0", 16); uuid->bytes[15] = (char)physical_of[device])
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
    ANSWER_OF(device, *can = device != peer && settings.peer)

static int attribute_of_each(CUdevice_attribute attribute) { /* of all devices the same */
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: return number("CUSIM_INTEGRATED", 0);
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: return 1;
    default: return 0; /* nobody asks for more */
    }
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
    ANSWER_OF(device, *value = attribute_of_each(attribute))

/* --- contexts: primary ones only --- */
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
    ANSWER_OF(device, primary[device].retained = true; *context = &primary[device])
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
    ANSWER_OF(device, *flags = 0; *active = primary[device].retained)
CUresult cuCtxGetCurrent(CUcontext *context) ANSWER(INITIALISED, *context = depth ? stack[depth - 1] : NULL)
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
