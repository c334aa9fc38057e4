/* Device memory: addresses, allocations, copies, what pointers are; memory of the host that was pinned. */
#include "cusim.h"

#define GRANULES 32768 /* 64 GiB of addresses */
static CUdeviceptr arena; /* PROT_NONE: whatever lies in it and in no allocation is a fault */
static bool taken[GRANULES];
struct allocation *allocations;
static size_t used[MAX_DEVICES];

CUdeviceptr take_addresses(size_t size) {
    if (!arena) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        char *base = mmap(NULL, (GRANULES + 1) * GRANULE, PROT_NONE, flags, -1, 0);
        if (base == MAP_FAILED) return 0;
        arena = ROUND_UP((CUdeviceptr)base);
    }
    size_t wanted = ROUND_UP(size) / GRANULE, found = 0;
    for (size_t i = 0; i < GRANULES; i++) {
        found = taken[i] ? 0 : found + 1;
        if (found == wanted) {
            memset(taken + i + 1 - wanted, true, wanted);
            return arena + (i + 1 - wanted) * GRANULE;
        }
    }
    return 0;
}
void give_addresses(CUdeviceptr base, size_t size) {
    memset(taken + (base - arena) / GRANULE, false, ROUND_UP(size) / GRANULE);
}

char *map_file(int fd, size_t size) {
    char *bytes = mmap(NULL, ROUND_UP(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return bytes == MAP_FAILED ? NULL : bytes;
}
int make_memory(int device, size_t size) {
    if (size > settings.memory || ROUND_UP(size) > settings.memory - used[device]) return -1;
    int fd = memfd_create("cusim", MFD_CLOEXEC);
    if (fd >= 0 && !ftruncate(fd, ROUND_UP(size))) used[device] += ROUND_UP(size);
    return fd;
}
void discharge(int device, size_t size) { used[device] -= ROUND_UP(size); }

struct allocation *find_allocation(CUdeviceptr pointer) {
    struct allocation *each = allocations;
    while (each && !(pointer >= each->base && pointer < each->base + each->size)) each = each->next;
    return each;
}
struct allocation *add_allocation(enum origin origin, int device, int fd, CUdeviceptr base, size_t size, char *bytes) {
    struct allocation *made = malloc(sizeof *made);
    *made = (struct allocation){base, size, bytes, device, fd, 1, origin, .next = allocations};
    return allocations = made;
}
void drop_allocation(struct allocation *allocation) { /* addresses of VMM are given back by who reserved them */
    struct allocation **link = &allocations;
    while (*link != allocation) link = &(*link)->next;
    *link = allocation->next;
    munmap(allocation->bytes, ROUND_UP(allocation->size));
    if (allocation->fd >= 0) close(allocation->fd);
    if (allocation->origin != VMM) give_addresses(allocation->base, allocation->size);
    free(allocation);
}

char *reach(CUdeviceptr pointer, size_t size) {
    HOLD(&lock);
    struct allocation *found = find_allocation(pointer);
    if (found) return size <= found->base + found->size - pointer ? found->bytes + (pointer - found->base) : NULL;
    return arena && pointer >= arena && pointer < arena + GRANULES * GRANULE ? NULL : (char *)pointer; /* the host's */
}

static CUresult allocate(CUdeviceptr *pointer, size_t size, enum origin origin) {
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    HOLD(&lock);
    int device = current_device(), fd = make_memory(device, size);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    char *bytes = map_file(fd, size);
    *pointer = take_addresses(size);
    if (!bytes || !*pointer) abort(); /* the host's fault, no test's */
    memset(bytes, 0xCD, size); /* fresh memory is never what somebody hopes for */
    add_allocation(origin, device, fd, *pointer, size, bytes);
    return CUDA_SUCCESS;
}
CUresult free_memory(CUdeviceptr pointer) {
    HOLD(&lock);
    struct allocation *found = find_allocation(pointer);
    if (!found || found->base != pointer) return CUDA_ERROR_INVALID_VALUE;
    if (found->origin != ALLOCATED && found->origin != POOL) return CUDA_ERROR_INVALID_VALUE;
    discharge(found->device, found->size);
    drop_allocation(found);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) GIVES(CONTEXT, allocate(pointer, size, ALLOCATED))
CUresult cuMemFree(CUdeviceptr pointer) {
    ENTER(CONTEXT);
    drain_device(current_device());
    return pointer ? free_memory(pointer) : CUDA_SUCCESS;
}
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) {
    ENTER(CONTEXT);
    (void)stream; /* from the default pool: it has no legacy handle */
    return allocate(pointer, size, POOL);
}
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
    GIVES(CONTEXT, push(stream, (struct operation){.what = FREE, .to = pointer}))
CUresult cuMemGetInfo(size_t *available, size_t *total) {
    ENTER(CONTEXT);
    *total = settings.memory;
    *available = settings.memory - used[current_device()];
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    HOLD(&lock);
    struct allocation *found = find_allocation(pointer);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = found->base;
    if (size) *size = found->size;
    return CUDA_SUCCESS;
}

/* --- the host's memory --- */
static struct pinned {
    char *base;
    size_t size;
    struct pinned *next;
} *pinned;

static struct pinned **find_pinned(char *pointer, size_t size) {
    struct pinned **link = &pinned;
    while (*link && !(pointer < (*link)->base + (*link)->size && (*link)->base < pointer + size)) link = &(*link)->next;
    return link;
}
CUresult cuMemHostRegister(void *pointer, size_t size, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    HOLD(&lock);
    if (!pointer || !size) return CUDA_ERROR_INVALID_VALUE;
    if (*find_pinned(pointer, size)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    struct pinned *made = malloc(sizeof *made);
    *made = (struct pinned){pointer, size, pinned};
    pinned = made;
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *pointer) {
    ENTER(CONTEXT);
    HOLD(&lock);
    struct pinned **link = find_pinned(pointer, 1), *found = *link;
    if (!found || found->base != (char *)pointer) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    *link = found->next;
    free(found);
    return CUDA_SUCCESS;
}

/* --- what a pointer is --- */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    HOLD(&lock);
    struct allocation *memory = find_allocation(pointer);
    if (!memory && (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE || !*find_pinned((char *)pointer, 1)))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = memory ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = memory->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(bool *)data = memory->origin == ALLOCATED; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)data = memory->origin == POOL ? (void *)used : NULL; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = memory->origin == VMM ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
        break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* --- copies: all through streams, so that order is what a test believes it to be --- */
#define COPYING {COPY, .to = (CUdeviceptr)to, .from = (CUdeviceptr)from, .count = size}
#define COPY_FUNCTION(name, to_type, from_type)                                                             \
    CUresult name(to_type to, from_type from, size_t size)                                                  \
        GIVES(CONTEXT, run_at_once((struct operation)COPYING))                                              \
    CUresult name##Async(to_type to, from_type from, size_t size, CUstream stream)                          \
        GIVES(CONTEXT, push(stream, (struct operation)COPYING))
COPY_FUNCTION(cuMemcpy, CUdeviceptr, CUdeviceptr)
COPY_FUNCTION(cuMemcpyHtoD, CUdeviceptr, const void *)
COPY_FUNCTION(cuMemcpyDtoH, void *, CUdeviceptr)
COPY_FUNCTION(cuMemcpyDtoD, CUdeviceptr, CUdeviceptr)

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream)
    GIVES(CONTEXT, push(stream, (struct operation){FILL, .to = to, .count = count, .value = value}))
