/* Memory and its addresses, of devices and pinned by the host; what pointers are; copies. */
#include "cusim.h"

/* --- memory --- */
static size_t used[MAX_DEVICES];

struct memory *adopt_memory(int device, int fd, size_t size) {
    struct memory *made = malloc(sizeof *made);
    *made = (struct memory){.device = device, .fd = fd, .size = size};
    return made;
}
struct memory *make_memory(int device, size_t size) {
    if (size > settings.memory || ROUND_UP(size) > settings.memory - used[device]) return NULL;
    int fd = memfd_create("cusim", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)ROUND_UP(size))) abort(); /* the host's fault, no test's */
    struct memory *made = adopt_memory(device, fd, size);
    used[device] += made->charged = ROUND_UP(size);
    return made;
}
void let_go(struct memory *memory) {
    if (--memory->references) return;
    used[memory->device] -= memory->charged;
    close(memory->fd);
    free(memory);
}

/* --- addresses --- */
#define ADDRESSES ((size_t)64 << 30)
static CUdeviceptr arena; /* PROT_NONE: whatever lies in it and in no range is a fault */
struct ranges ranges;

struct range *find_range(CUdeviceptr base, size_t size, enum origin origins) {
    struct range *each;
    LIST_FOREACH(each, &ranges, link)
        if (each->origin & origins && base < each->base + each->size && each->base < base + size) break;
    return each;
}
CUdeviceptr free_addresses(size_t size) { /* the lowest, so that addresses are used again */
    if (!arena) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        arena = ROUND_UP((CUdeviceptr)mmap(NULL, ADDRESSES + GRANULE, PROT_NONE, flags, -1, 0));
    }
    CUdeviceptr base = arena;
    for (struct range *there; size <= ADDRESSES && (there = find_range(base, ROUND_UP(size), ANY));)
        base = ROUND_UP(there->base + there->size);
    return size <= arena + ADDRESSES - base ? base : 0;
}
struct range *add_range(CUdeviceptr base, size_t size, enum origin origin, struct memory *memory) {
    struct range *made = malloc(sizeof *made);
    *made = (struct range){base, size, origin, memory, .opens = 1};
    if (memory) {
        made->bytes = mmap(NULL, ROUND_UP(size), PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
        if (!base || made->bytes == MAP_FAILED) abort(); /* the host's fault, no test's */
        memory->references++;
    }
    LIST_INSERT_HEAD(&ranges, made, link);
    return made;
}
bool drop_range(CUdeviceptr base, size_t size, enum origin origins) {
    struct range *found = find_range(base, 1, origins);
    if (!found || found->base != base || (size != ANY_SIZE && found->size != size)) return false;
    if (--found->opens) return true;
    LIST_REMOVE(found, link);
    if (found->memory) {
        munmap(found->bytes, ROUND_UP(found->size));
        let_go(found->memory);
    }
    free(found);
    return true;
}
char *reach(CUdeviceptr pointer, size_t size) {
    struct range *found = find_range(pointer, 1, ON_DEVICE);
    if (found) return size <= found->base + found->size - pointer ? found->bytes + (pointer - found->base) : NULL;
    return arena && pointer >= arena && pointer < arena + ADDRESSES ? NULL : (char *)pointer; /* the host's */
}

/* --- allocations --- */
static CUresult allocate(CUdeviceptr *pointer, size_t size, enum origin origin) {
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory = make_memory(current_device(), size);
    if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = free_addresses(size);
    memset(add_range(*pointer, size, origin, memory)->bytes, 0xCD, size); /* never what was hoped for */
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) GIVES(CONTEXT, allocate(pointer, size, ALLOCATED))
CUresult cuMemFree(CUdeviceptr pointer)
    GIVES(CONTEXT, (drain_device(), VALID(!pointer || drop_range(pointer, ANY_SIZE, ALLOCATED | POOL))))
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t size, CUstream stream) /* POOL: it has no legacy handle */
    GIVES(CONTEXT, allocate(pointer, size, POOL))
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
    GIVES(CONTEXT, push(stream, (struct operation){.what = FREE, .to = pointer}))
CUresult cuMemGetInfo(size_t *available, size_t *total)
    ANSWER(CONTEXT, *total = settings.memory; *available = settings.memory - used[current_device()])

/* --- the host's memory --- */
CUresult cuMemHostRegister(void *pointer, size_t size, unsigned flags) {
    ENTER(CONTEXT);
    if (!pointer || !size) return CUDA_ERROR_INVALID_VALUE;
    if (find_range((CUdeviceptr)pointer, size, PINNED)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add_range((CUdeviceptr)pointer, size, PINNED, NULL);
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *pointer)
    GIVES(CONTEXT, drop_range((CUdeviceptr)pointer, ANY_SIZE, PINNED) ? CUDA_SUCCESS
                                                                      : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)

/* --- what a pointer is --- */
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    struct range *found = find_range(pointer, 1, ON_DEVICE);
    if (found) *base = found->base, *size = found->size;
    return VALID(found);
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    bool any = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    struct range *found = find_range(pointer, 1, any ? ON_DEVICE | PINNED : ON_DEVICE);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = found->memory ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = found->memory->device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(bool *)data = found->origin == ALLOCATED; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *(void **)data = found->origin == POOL ? (void *)used : NULL; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = found->origin == VMM ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
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
