/* Which functions there are. Bindings look every one up by the name without a version; a function that is not here is
 * "not found", never a stub that succeeds. `cuda.h` turns such a name into the newest version of the function. */
#include "cusim.h"

#define FUNCTION(name) {#name, (void *)name}
static const struct {
    const char *name;
    void *function;
} table[] = {
    FUNCTION(cuInit), FUNCTION(cuDriverGetVersion), FUNCTION(cuGetErrorName),
    FUNCTION(cuDeviceGetCount), FUNCTION(cuDeviceGet), FUNCTION(cuDeviceGetName), FUNCTION(cuDeviceTotalMem),
    FUNCTION(cuDeviceGetUuid), FUNCTION(cuDeviceGetPCIBusId), FUNCTION(cuDeviceCanAccessPeer),
    FUNCTION(cuDeviceGetAttribute), FUNCTION(cuDevicePrimaryCtxRetain), FUNCTION(cuDevicePrimaryCtxRelease),
    FUNCTION(cuDevicePrimaryCtxGetState), FUNCTION(cuCtxGetCurrent), FUNCTION(cuCtxSetCurrent),
    FUNCTION(cuCtxPushCurrent), FUNCTION(cuCtxPopCurrent), FUNCTION(cuCtxGetDevice), FUNCTION(cuCtxSynchronize),
    FUNCTION(cuMemAlloc), FUNCTION(cuMemFree), FUNCTION(cuMemAllocAsync), FUNCTION(cuMemFreeAsync),
    FUNCTION(cuMemGetInfo), FUNCTION(cuMemGetAddressRange), FUNCTION(cuPointerGetAttribute),
    FUNCTION(cuMemHostRegister), FUNCTION(cuMemHostUnregister),
    FUNCTION(cuMemcpy), FUNCTION(cuMemcpyAsync), FUNCTION(cuMemcpyHtoD), FUNCTION(cuMemcpyHtoDAsync),
    FUNCTION(cuMemcpyDtoH), FUNCTION(cuMemcpyDtoHAsync), FUNCTION(cuMemcpyDtoD), FUNCTION(cuMemcpyDtoDAsync),
    FUNCTION(cuMemsetD8), FUNCTION(cuMemsetD8Async), FUNCTION(cuMemsetD32Async),
    FUNCTION(cuIpcGetMemHandle), FUNCTION(cuIpcOpenMemHandle), FUNCTION(cuIpcCloseMemHandle),
    FUNCTION(cuIpcGetEventHandle), FUNCTION(cuIpcOpenEventHandle),
    FUNCTION(cuMemGetAllocationGranularity), FUNCTION(cuMemCreate), FUNCTION(cuMemRelease),
    FUNCTION(cuMemExportToShareableHandle), FUNCTION(cuMemImportFromShareableHandle),
    FUNCTION(cuMemGetAllocationPropertiesFromHandle), FUNCTION(cuMemRetainAllocationHandle),
    FUNCTION(cuMemAddressReserve), FUNCTION(cuMemAddressFree), FUNCTION(cuMemMap), FUNCTION(cuMemUnmap),
    FUNCTION(cuMemSetAccess),
    FUNCTION(cuStreamCreate), FUNCTION(cuStreamDestroy), FUNCTION(cuStreamSynchronize), FUNCTION(cuStreamQuery),
    FUNCTION(cuStreamWaitEvent), FUNCTION(cuLaunchHostFunc),
    FUNCTION(cuEventCreate), FUNCTION(cuEventDestroy), FUNCTION(cuEventRecord), FUNCTION(cuEventQuery),
    FUNCTION(cuEventSynchronize),
};

CUresult cuGetProcAddress(
    const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    (void)version, (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table && !*function; i++)
        if (!strcmp(table[i].name, name)) *function = table[i].function;
    if (!strcmp(name, "cuGetProcAddress")) *function = (void *)cuGetProcAddress;
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
