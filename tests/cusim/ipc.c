/* Legacy IPC: 64-byte handles of memory and of events. A handle names /proc/PID/fd/FD and its inode, so it ends with the
 * exporter and nothing is left anywhere. As with CUDA, both processes need the same user and the same pid namespace. */
#include "cusim.h"

void write_handle(void *out, uint32_t magic, int fd, int device, uint64_t size, CUdeviceptr base) {
    struct stat status;
    fstat(fd, &status);
    struct handle handle = {magic, getpid(), fd, physical_of[device], status.st_ino, size, base};
    memset(out, 0, CU_IPC_HANDLE_SIZE);
    memcpy(out, &handle, sizeof handle);
}

int open_handle(const struct handle *handle, uint32_t magic) {
    if (handle->magic != magic) return -1;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd >= 0 && (fstat(fd, &status) || status.st_ino != handle->inode)) { /* freed: the number is another file's by now */
        close(fd);
        return -1;
    }
    return fd;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    pthread_mutex_lock(&lock);
    struct allocation *found = find_allocation(pointer);
    bool capable = found && found->origin == ALLOCATED;
    if (capable) write_handle(handle, MEMORY_MAGIC, found->fd, found->device, found->size, found->base);
    pthread_mutex_unlock(&lock);
    return capable ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The import of `handle`, or one that its exporter's addresses had before: CUDA refuses a second one there. */
static struct allocation *known_import(const struct handle *handle, bool *stale) {
    for (struct allocation *each = first_allocation(); each; each = each->next) {
        if (each->origin != IMPORTED || each->device != current_device() || each->from.pid != handle->pid) continue;
        if (each->from.inode == handle->inode) return each;
        if (each->from.base < handle->base + handle->size && handle->base < each->from.base + each->from.size) *stale = true;
    }
    return NULL;
}
static CUresult import(CUdeviceptr *pointer, const struct handle *handle) {
    bool stale = false;
    struct allocation *known = known_import(handle, &stale);
    if (known) {
        known->opens++;
        *pointer = known->base;
        return CUDA_SUCCESS;
    }
    if (stale) return CUDA_ERROR_ALREADY_MAPPED;
    int fd = open_handle(handle, MEMORY_MAGIC);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    char *bytes = map_file(fd, handle->size, 0);
    CUdeviceptr base = bytes ? take_addresses(handle->size) : 0;
    if (!base) {
        close(fd);
        return CUDA_ERROR_MAP_FAILED;
    }
    add_allocation(IMPORTED, current_device(), fd, base, handle->size, bytes)->from = *handle;
    *pointer = base;
    return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle wire, unsigned flags) {
    ENTER(CONTEXT);
    struct handle handle;
    memcpy(&handle, &wire, sizeof handle);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != MEMORY_MAGIC) return CUDA_ERROR_INVALID_VALUE;
    if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (handle.physical != physical_of[current_device()] && !settings.peer) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    pthread_mutex_lock(&lock);
    CUresult result = import(pointer, &handle);
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
    ENTER(CONTEXT);
    drain_device(current_device());
    pthread_mutex_lock(&lock);
    struct allocation *found = find_allocation(pointer);
    bool ours = found && found->origin == IMPORTED && found->base == pointer;
    if (ours && !--found->opens) drop_allocation(found);
    pthread_mutex_unlock(&lock);
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
    ENTER(CONTEXT);
    if (event->fd < 0) return CUDA_ERROR_INVALID_HANDLE; /* not made with CU_EVENT_INTERPROCESS */
    write_handle(handle, EVENT_MAGIC, event->fd, current_device(), 0, 0);
    return CUDA_SUCCESS;
}
CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle wire) {
    ENTER(CONTEXT);
    struct handle handle;
    memcpy(&handle, &wire, sizeof handle);
    if (handle.magic != EVENT_MAGIC) return CUDA_ERROR_INVALID_HANDLE;
    if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int fd = open_handle(&handle, EVENT_MAGIC);
    void *state = fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (state == MAP_FAILED) return CUDA_ERROR_INVALID_HANDLE;
    close(fd);
    *event = calloc(1, sizeof **event);
    **event = (struct CUevent_st){state, -1};
    return CUDA_SUCCESS;
}
