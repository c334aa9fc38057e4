/* Which functions there are. Bindings look every one up by the name without a version; a function that is not here is
 * "not found", never a stub that succeeds. `cuda.h` turns such a name into the newest version of the function. */
#include "cusim.h"

#define F(name) {#name, (void *)name}
static const struct {
    const char *name;
    void *function;
} table[] = {
    F(cuInit), F(cuDriverGetVersion), F(cuDeviceGetCount), F(cuDeviceGet), F(cuDeviceGetName), F(cuDeviceTotalMem),
    F(cuDeviceGetUuid), F(cuDeviceCanAccessPeer), F(cuDeviceGetAttribute), F(cuDevicePrimaryCtxRetain),
    F(cuDevicePrimaryCtxGetState), F(cuCtxGetCurrent), F(cuCtxPushCurrent), F(cuCtxPopCurrent), F(cuCtxSynchronize), F(cuMemAlloc),
    F(cuMemFree), F(cuMemAllocAsync), F(cuMemFreeAsync), F(cuMemGetInfo), F(cuMemGetAddressRange),
    F(cuPointerGetAttribute), F(cuMemHostRegister), F(cuMemHostUnregister), F(cuMemcpy), F(cuMemcpyAsync),
    F(cuMemcpyHtoD), F(cuMemcpyHtoDAsync), F(cuMemcpyDtoH), F(cuMemcpyDtoHAsync), F(cuMemcpyDtoD),
    F(cuMemcpyDtoDAsync), F(cuMemsetD8Async), F(cuIpcGetMemHandle), F(cuIpcOpenMemHandle), F(cuIpcCloseMemHandle),
    F(cuIpcGetEventHandle), F(cuIpcOpenEventHandle), F(cuMemGetAllocationGranularity), F(cuMemCreate), F(cuMemRelease),
    F(cuMemExportToShareableHandle), F(cuMemImportFromShareableHandle), F(cuMemRetainAllocationHandle),
    F(cuMemAddressReserve), F(cuMemAddressFree), F(cuMemMap), F(cuMemUnmap), F(cuMemSetAccess), F(cuStreamCreate),
    F(cuStreamDestroy), F(cuStreamSynchronize), F(cuStreamQuery), F(cuStreamWaitEvent), F(cuLaunchHostFunc),
    F(cuEventCreate), F(cuEventDestroy), F(cuEventRecord), F(cuEventQuery), F(cuEventSynchronize),
};

CUresult cuGetProcAddress(
    const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    (void)version, (void)flags;
    *function = strcmp(name, "cuGetProcAddress") ? NULL : (void *)cuGetProcAddress;
    for (size_t i = 0; i < sizeof table / sizeof *table && !*function; i++)
        if (!strcmp(table[i].name, name)) *function = table[i].function;
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
