/* Virtual memory management: physical memory as a descriptor, mapped at reserved addresses. */
#include "cusim.h"

struct physical {
    int fd, device, references;
    size_t size;
    bool charged; /* made here; what was imported costs its maker */
};

static CUmemGenericAllocationHandle make_physical(int fd, int device, size_t size, bool charged) {
    struct physical *made = malloc(sizeof *made);
    *made = (struct physical){fd, device, 1, size, charged};
    return (uintptr_t)made;
}
static void let_go(struct physical *physical) { /* with `lock` held */
    if (--physical->references) return;
    if (physical->charged) discharge(physical->device, physical->size);
    close(physical->fd);
    free(physical);
}

CUresult cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option) {
    ENTER(INITIALISED);
    (void)option;
    *granularity = GRANULE;
    return is_device(properties->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
    unsigned long long flags) {
    ENTER(INITIALISED);
    HOLD(&lock);
    int device = properties->location.id;
    if (!size || size % GRANULE || flags || !is_device(device)) return CUDA_ERROR_INVALID_VALUE;
    int fd = make_memory(device, size);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = make_physical(fd, device, size, true);
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(INITIALISED);
    HOLD(&lock);
    let_go((struct physical *)handle);
    return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(
    void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(INITIALISED);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)out = fcntl(((struct physical *)handle)->fd, F_DUPFD_CLOEXEC, 3);
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle *handle, void *given, CUmemAllocationHandleType type) {
    ENTER(CONTEXT);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    char path[64], target[64] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)given);
    bool ours = readlink(path, target, sizeof target - 1) > 0 && strstr(target, "memfd:cusim");
    struct stat status;
    int fd = ours ? fcntl((int)(intptr_t)given, F_DUPFD_CLOEXEC, 3) : -1;
    if (fd < 0 || fstat(fd, &status)) return CUDA_ERROR_INVALID_VALUE;
    *handle = make_physical(fd, current_device(), status.st_size, false);
    return CUDA_SUCCESS;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *pointer) {
    ENTER(INITIALISED);
    HOLD(&lock);
    struct allocation *found = find_allocation((CUdeviceptr)pointer);
    if (!found || found->origin != VMM) return CUDA_ERROR_INVALID_VALUE;
    found->physical->references++;
    *handle = (uintptr_t)found->physical;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(
    CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    ENTER(INITIALISED);
    (void)alignment, (void)wish;
    HOLD(&lock);
    if (!size || size % GRANULE || flags) return CUDA_ERROR_INVALID_VALUE;
    *pointer = take_addresses(size);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    ENTER(INITIALISED);
    HOLD(&lock);
    if (find_allocation(pointer)) return CUDA_ERROR_INVALID_VALUE; /* still mapped */
    give_addresses(pointer, size);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(
    CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER(INITIALISED);
    HOLD(&lock);
    struct physical *physical = (struct physical *)handle;
    if (!size || size % GRANULE || offset || size > physical->size || flags) return CUDA_ERROR_INVALID_VALUE;
    char *bytes = find_allocation(pointer) ? NULL : map_file(physical->fd, size);
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    physical->references++;
    add_allocation(VMM, physical->device, -1, pointer, size, bytes)->physical = physical;
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER(INITIALISED);
    (void)size, (void)access, (void)count;
    return pointer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    ENTER(INITIALISED);
    HOLD(&lock);
    struct allocation *found = find_allocation(pointer);
    bool whole = found && found->origin == VMM && found->base == pointer && found->size == size;
    if (!whole) return CUDA_ERROR_INVALID_VALUE;
    let_go(found->physical);
    drop_allocation(found);
    return CUDA_SUCCESS;
}
