/* Device memory: addresses, allocations, copies, what pointers are. */
#include "cusim.h"

#define GRANULES 32768 /* 64 GiB of addresses */
static CUdeviceptr arena; /* PROT_NONE: whatever lies in it and in no allocation is a fault */
static bool taken[GRANULES];
static struct allocation *allocations;
static size_t used[MAX_DEVICES];
static uint64_t next_id = 1;

struct pinned {
    char *base;
    size_t size;
    struct pinned *next;
};
static struct pinned *pinned;

CUdeviceptr take_addresses(size_t size) {
    if (!arena) {
        char *base = mmap(NULL, (GRANULES + 1) * GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) return 0;
        arena = ROUND_UP((CUdeviceptr)base);
    }
    size_t wanted = ROUND_UP(size) / GRANULE, free_ones = 0;
    for (size_t i = 0; i < GRANULES; i++) {
        free_ones = taken[i] ? 0 : free_ones + 1;
        if (free_ones == wanted) {
            memset(taken + i + 1 - wanted, true, wanted);
            return arena + (i + 1 - wanted) * GRANULE;
        }
    }
    return 0;
}
void give_addresses(CUdeviceptr base, size_t size) { memset(taken + (base - arena) / GRANULE, false, ROUND_UP(size) / GRANULE); }

char *map_file(int fd, size_t size, off_t offset) {
    char *bytes = mmap(NULL, ROUND_UP(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    return bytes == MAP_FAILED ? NULL : bytes;
}
bool charge(int device, size_t size) {
    if (ROUND_UP(size) > settings.memory - used[device]) return false;
    used[device] += ROUND_UP(size);
    return true;
}
void discharge(int device, size_t size) { used[device] -= ROUND_UP(size); }

struct allocation *first_allocation(void) { return allocations; }
struct allocation *find_allocation(CUdeviceptr pointer) {
    for (struct allocation *each = allocations; each; each = each->next)
        if (pointer >= each->base && pointer < each->base + each->size) return each;
    return NULL;
}
struct allocation *add_allocation(enum origin origin, int device, int fd, CUdeviceptr base, size_t size, char *bytes) {
    struct allocation *made = calloc(1, sizeof *made);
    *made = (struct allocation){.base = base, .size = size, .mapped = ROUND_UP(size), .bytes = bytes, .device = device,
                                .fd = fd, .opens = 1, .origin = origin, .id = next_id++, .next = allocations};
    return allocations = made;
}
/* Everything of it goes but its addresses where VMM reserved them. */
void drop_allocation(struct allocation *allocation) {
    struct allocation **link = &allocations;
    while (*link != allocation) link = &(*link)->next;
    *link = allocation->next;
    munmap(allocation->bytes, allocation->mapped);
    if (allocation->fd >= 0) close(allocation->fd);
    if (allocation->origin != VMM) give_addresses(allocation->base, allocation->mapped);
    free(allocation);
}

char *reach(CUdeviceptr pointer, size_t size) {
    pthread_mutex_lock(&lock);
    char *found = NULL;
    struct allocation *allocation = find_allocation(pointer);
    if (allocation)
        found = size <= allocation->base + allocation->size - pointer ? allocation->bytes + (pointer - allocation->base) : NULL;
    else if (!arena || pointer < arena || pointer >= arena + GRANULES * GRANULE)
        found = (char *)pointer; /* the host's */
    pthread_mutex_unlock(&lock);
    return found;
}

static CUresult allocate(CUdeviceptr *pointer, size_t size, enum origin origin) {
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    int device = current_device();
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (charge(device, size)) {
        int fd = memfd_create("cusim", MFD_CLOEXEC);
        char *bytes = fd >= 0 && !ftruncate(fd, ROUND_UP(size)) ? map_file(fd, size, 0) : NULL;
        CUdeviceptr base = bytes ? take_addresses(size) : 0;
        if (base) {
            memset(bytes, 0xCD, size); /* fresh memory is never what somebody hopes for */
            add_allocation(origin, device, fd, base, size, bytes);
            *pointer = base;
            result = CUDA_SUCCESS;
        } else
            discharge(device, size);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
static CUresult release(CUdeviceptr pointer) {
    pthread_mutex_lock(&lock);
    struct allocation *found = find_allocation(pointer);
    bool fits = found && found->base == pointer && (found->origin == ALLOCATED || found->origin == POOL);
    if (fits) {
        discharge(found->device, found->size);
        drop_allocation(found);
    }
    pthread_mutex_unlock(&lock);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
void free_from_pool(CUdeviceptr pointer) { release(pointer); }

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    ENTER(CONTEXT);
    return allocate(pointer, size, ALLOCATED);
}
CUresult cuMemFree(CUdeviceptr pointer) {
    ENTER(CONTEXT);
    drain_device(current_device());
    return pointer ? release(pointer) : CUDA_SUCCESS;
}
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) { /* from the default pool: no legacy IPC */
    ENTER(CONTEXT);
    (void)stream;
    return allocate(pointer, size, POOL);
}
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    ENTER(CONTEXT);
    push(stream, (struct operation){.what = FREE, .to = pointer});
    return CUDA_SUCCESS;
}
CUresult cuMemGetInfo(size_t *available, size_t *total) {
    ENTER(CONTEXT);
    *total = settings.memory;
    *available = settings.memory - used[current_device()];
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct allocation *found = find_allocation(pointer);
    if (found && base) *base = found->base;
    if (found && size) *size = found->size;
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- what a pointer is --- */
static bool attribute_of(struct allocation *memory, CUpointer_attribute attribute, void *data) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = CU_MEMORYTYPE_DEVICE; return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = memory->device; return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = memory->id; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = memory->base; return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = memory->size; return true;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(bool *)data = memory->origin == ALLOCATED; return true;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)data = memory->origin == POOL ? (void *)&allocations : NULL; return true;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = memory->origin == VMM ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
        return true;
    default: return false;
    }
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct allocation *found = find_allocation(pointer);
    bool known = found && attribute_of(found, attribute, data);
    for (struct pinned *each = pinned; each && !found; each = each->next)
        if ((char *)pointer >= each->base && (char *)pointer < each->base + each->size) {
            known = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
            if (known) *(unsigned *)data = CU_MEMORYTYPE_HOST;
        }
    pthread_mutex_unlock(&lock);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- the host's memory --- */
CUresult cuMemHostRegister(void *pointer, size_t size, unsigned flags) {
    ENTER(CONTEXT);
    (void)flags;
    if (!pointer || !size) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    bool known = false;
    for (struct pinned *each = pinned; each; each = each->next)
        known |= (char *)pointer < each->base + each->size && each->base < (char *)pointer + size;
    if (!known) {
        struct pinned *made = malloc(sizeof *made);
        *made = (struct pinned){pointer, size, pinned};
        pinned = made;
    }
    pthread_mutex_unlock(&lock);
    return known ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *pointer) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct pinned **link = &pinned, *found;
    while (*link && (*link)->base != (char *)pointer) link = &(*link)->next;
    if ((found = *link)) *link = found->next;
    pthread_mutex_unlock(&lock);
    free(found);
    return found ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

/* --- copies: all through streams, so that order is what a test believes it to be --- */
#define COPY_FUNCTION(name, to_type, from_type)                                                                        \
    CUresult name(to_type to, from_type from, size_t size) {                                                           \
        ENTER(CONTEXT);                                                                                                \
        return run_at_once((struct operation){                                                                         \
            .what = COPY, .to = (CUdeviceptr)to, .from = (CUdeviceptr)from, .count = size});                           \
    }                                                                                                                  \
    CUresult name##Async(to_type to, from_type from, size_t size, CUstream stream) {                                   \
        ENTER(CONTEXT);                                                                                                \
        push(stream, (struct operation){                                                                               \
            .what = COPY, .to = (CUdeviceptr)to, .from = (CUdeviceptr)from, .count = size});                           \
        return CUDA_SUCCESS;                                                                                           \
    }
COPY_FUNCTION(cuMemcpy, CUdeviceptr, CUdeviceptr)
COPY_FUNCTION(cuMemcpyHtoD, CUdeviceptr, const void *)
COPY_FUNCTION(cuMemcpyDtoH, void *, CUdeviceptr)
COPY_FUNCTION(cuMemcpyDtoD, CUdeviceptr, CUdeviceptr)

CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
    ENTER(CONTEXT);
    return run_at_once((struct operation){.what = FILL, .to = to, .count = count, .value = value, .width = 1});
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    ENTER(CONTEXT);
    push(stream, (struct operation){.what = FILL, .to = to, .count = count, .value = value, .width = 1});
    return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    ENTER(CONTEXT);
    push(stream, (struct operation){.what = FILL, .to = to, .count = count, .value = value, .width = 4});
    return CUDA_SUCCESS;
}
