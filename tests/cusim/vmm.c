/* Virtual memory management: physical memory as a descriptor, mapped at reserved addresses. */
#include "cusim.h"

struct physical {
    int fd, device, references;
    size_t size;
    bool charged; /* made here; what was imported costs its maker */
};

static struct physical *make_physical(int fd, int device, size_t size, bool charged) {
    struct physical *made = malloc(sizeof *made);
    *made = (struct physical){fd, device, 1, size, charged};
    return made;
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
    if (!is_device(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties, unsigned long long flags) {
    ENTER(INITIALISED);
    int device = properties->location.id;
    if (!size || size % GRANULE || flags) return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    bool fits = charge(device, size);
    int fd = fits ? memfd_create("cusim-vmm", MFD_CLOEXEC) : -1;
    bool made = fd >= 0 && !ftruncate(fd, size);
    if (made)
        *handle = (uintptr_t)make_physical(fd, device, size, true);
    else if (fits)
        discharge(device, size);
    pthread_mutex_unlock(&lock);
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(INITIALISED);
    pthread_mutex_lock(&lock);
    let_go((struct physical *)handle);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(
    void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER(INITIALISED);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags) return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)out = fcntl(((struct physical *)handle)->fd, F_DUPFD_CLOEXEC, 3);
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type) {
    ENTER(CONTEXT);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    char path[64], target[64] = "";
    int given = (int)(intptr_t)os_handle;
    snprintf(path, sizeof path, "/proc/self/fd/%d", given);
    struct stat status;
    bool ours = readlink(path, target, sizeof target - 1) > 0 && strstr(target, "memfd:cusim-vmm") && !fstat(given, &status);
    int fd = ours ? fcntl(given, F_DUPFD_CLOEXEC, 3) : -1;
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = (uintptr_t)make_physical(fd, current_device(), status.st_size, false);
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
    ENTER(INITIALISED);
    memset(properties, 0, sizeof *properties);
    properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties->location.id = ((struct physical *)handle)->device;
    return CUDA_SUCCESS;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *pointer) {
    ENTER(INITIALISED);
    pthread_mutex_lock(&lock);
    struct allocation *found = find_allocation((CUdeviceptr)pointer);
    bool mapped = found && found->origin == VMM;
    if (mapped) {
        found->physical->references++;
        *handle = (uintptr_t)found->physical;
    }
    pthread_mutex_unlock(&lock);
    return mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAddressReserve(
    CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    ENTER(INITIALISED);
    (void)alignment, (void)wish;
    if (!size || size % GRANULE || flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *pointer = take_addresses(size);
    pthread_mutex_unlock(&lock);
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    ENTER(INITIALISED);
    pthread_mutex_lock(&lock);
    bool mapped = find_allocation(pointer);
    if (!mapped) give_addresses(pointer, size);
    pthread_mutex_unlock(&lock);
    return mapped ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemMap(
    CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER(INITIALISED);
    struct physical *physical = (struct physical *)handle;
    if (!size || size % GRANULE || offset || size > physical->size || flags) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    char *bytes = find_allocation(pointer) ? NULL : map_file(physical->fd, size, 0);
    if (bytes) {
        physical->references++;
        add_allocation(VMM, physical->device, -1, pointer, size, bytes)->physical = physical;
    }
    pthread_mutex_unlock(&lock);
    return bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER(INITIALISED);
    (void)size, (void)access, (void)count;
    return pointer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    ENTER(INITIALISED);
    pthread_mutex_lock(&lock);
    struct allocation *found = find_allocation(pointer);
    bool whole = found && found->origin == VMM && found->base == pointer && found->size == size;
    if (whole) {
        let_go(found->physical);
        drop_allocation(found);
    }
    pthread_mutex_unlock(&lock);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
