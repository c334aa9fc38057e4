/* Legacy IPC: 64-byte handles of memory and of events. A handle names /proc/PID/fd/FD and its inode, so it ends with
 * the exporter and nothing is left anywhere. As with CUDA, both processes need the same user and pid namespace. */
#include "cusim.h"

#define MEMORY 0x6d495043u
#define EVENT 0x65495043u

static CUresult write_handle(void *out, uint32_t magic, int fd, int device, uint64_t size, CUdeviceptr base) {
    struct stat status;
    fstat(fd, &status);
    memset(out, 0, CU_IPC_HANDLE_SIZE);
    *(struct handle *)out = (struct handle){magic, getpid(), fd, physical_of[device], status.st_ino, size, base};
    return CUDA_SUCCESS;
}
static int open_handle(const struct handle *handle) { /* a descriptor; -1: what it names is no more */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || (!fstat(fd, &status) && status.st_ino == handle->inode)) return fd;
    close(fd); /* freed: the number is another file's by now */
    return -1;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    ENTER(CONTEXT);
    struct range *found = find_range(pointer, 1, ALLOCATED);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    return write_handle(handle, MEMORY, found->memory->fd, found->memory->device, found->size, found->base);
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle wire, unsigned flags) {
    ENTER(CONTEXT);
    struct handle handle;
    memcpy(&handle, &wire, sizeof handle);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != MEMORY) return CUDA_ERROR_INVALID_VALUE;
    if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int device = current_device();
    if (handle.physical != physical_of[device] && !settings.peer) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    struct range *each;
    LIST_FOREACH(each, &ranges, link) {
        struct handle *from = &each->from;
        if (each->origin != IMPORTED || each->memory->device != device || from->pid != handle.pid) continue;
        if (from->inode == handle.inode) {
            each->opens++;
            *pointer = each->base;
            return CUDA_SUCCESS;
        } /* what the exporter's addresses were before is still open: CUDA refuses a second mapping there */
        if (from->base < handle.base + handle.size && handle.base < from->base + from->size)
            return CUDA_ERROR_ALREADY_MAPPED;
    }
    int fd = open_handle(&handle);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    *pointer = free_addresses(handle.size);
    add_range(*pointer, handle.size, IMPORTED, adopt_memory(device, fd, handle.size))->from = handle;
    return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
    GIVES(CONTEXT, (drain_device(), VALID(drop_range(pointer, ANY_SIZE, IMPORTED))))

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
    ENTER(CONTEXT);
    if (event->owner != getpid() || event->fd < 0) return CUDA_ERROR_INVALID_HANDLE; /* not made with INTERPROCESS */
    return write_handle(handle, EVENT, event->fd, current_device(), 0, 0);
}
CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle wire) {
    ENTER(CONTEXT);
    struct handle handle;
    memcpy(&handle, &wire, sizeof handle);
    if (handle.magic != EVENT) return CUDA_ERROR_INVALID_HANDLE;
    if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int fd = open_handle(&handle);
    if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
    *event = mmap(NULL, sizeof **event, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return *event == MAP_FAILED ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}
