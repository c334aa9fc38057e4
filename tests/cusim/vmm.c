/* Virtual memory management: physical memory as a descriptor, mapped at reserved addresses. */
#include "cusim.h"

typedef CUmemGenericAllocationHandle Handle;
typedef unsigned long long Flags;

static CUresult give_handle(Handle *handle, struct memory *memory) {
    memory->references++;
    *handle = (uintptr_t)memory;
    return CUDA_SUCCESS;
}
static bool is_odd(size_t size) { return !size || size % GRANULE; }

CUresult cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *wanted, CUmemAllocationGranularity_flags option)
    ANSWER(INITIALISED, *granularity = GRANULE)
CUresult cuMemCreate(Handle *handle, size_t size, const CUmemAllocationProp *wanted, Flags flags) {
    ENTER(INITIALISED);
    if (is_odd(size) || flags || !is_device(wanted->location.id)) return CUDA_ERROR_INVALID_VALUE;
    struct memory *memory = make_memory(wanted->location.id, size);
    return memory ? give_handle(handle, memory) : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(Handle handle) ANSWER(INITIALISED, let_go((struct memory *)handle))
CUresult cuMemExportToShareableHandle(void *out, Handle handle, CUmemAllocationHandleType type, Flags flags) {
    ENTER(INITIALISED);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)out = fcntl(((struct memory *)handle)->fd, F_DUPFD_CLOEXEC, 3);
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(Handle *handle, void *given, CUmemAllocationHandleType type) {
    ENTER(CONTEXT);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    char path[64], target[64] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)given);
    bool ours = readlink(path, target, sizeof target - 1) > 0 && strstr(target, "memfd:cusim");
    if (!ours) return CUDA_ERROR_INVALID_VALUE;
    int fd = fcntl((int)(intptr_t)given, F_DUPFD_CLOEXEC, 3);
    return give_handle(handle, adopt_memory(current_device(), fd, (size_t)lseek(fd, 0, SEEK_END)));
}
CUresult cuMemRetainAllocationHandle(Handle *handle, void *pointer) {
    ENTER(INITIALISED);
    struct range *found = find_range((CUdeviceptr)pointer, 1, VMM);
    return found ? give_handle(handle, found->memory) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wish, Flags flags) {
    ENTER(INITIALISED);
    if (is_odd(size) || flags) return CUDA_ERROR_INVALID_VALUE;
    *pointer = free_addresses(size);
    if (!*pointer) return CUDA_ERROR_OUT_OF_MEMORY;
    add_range(*pointer, size, RESERVED, NULL);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size)
    GIVES(INITIALISED, VALID(!find_range(pointer, size, VMM) && drop_range(pointer, size, RESERVED)))
CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, Handle handle, Flags flags) {
    ENTER(INITIALISED);
    struct memory *memory = (struct memory *)handle;
    if (is_odd(size) || offset || size > memory->size || flags) return CUDA_ERROR_INVALID_VALUE;
    if (!find_range(pointer, size, RESERVED) || find_range(pointer, size, VMM)) return CUDA_ERROR_INVALID_VALUE;
    add_range(pointer, size, VMM, memory);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count)
    GIVES(INITIALISED, VALID(find_range(pointer, size, VMM)))
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) GIVES(INITIALISED, VALID(drop_range(pointer, size, VMM)))
