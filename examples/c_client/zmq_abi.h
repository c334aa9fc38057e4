/* The few functions of libzmq 4 that the example calls, for machines that have the library but not its headers
   (pyzmq's wheel ships one). Where <zmq.h> is installed, that is used. */
#ifndef TENSORBROKER_ZMQ_ABI_H
#define TENSORBROKER_ZMQ_ABI_H

#include <stddef.h>

#define ZMQ_DEALER 5
#define ZMQ_LINGER 17
#define ZMQ_RCVTIMEO 27
#define ZMQ_SNDTIMEO 28
#define ZMQ_IMMEDIATE 39

void *zmq_ctx_new(void);
int zmq_ctx_term(void *context);
void *zmq_socket(void *context, int type);
int zmq_close(void *socket);
int zmq_setsockopt(void *socket, int option, const void *value, size_t size);
int zmq_connect(void *socket, const char *endpoint);
int zmq_send(void *socket, const void *data, size_t size, int flags);
int zmq_recv(void *socket, void *data, size_t size, int flags);
int zmq_errno(void);
const char *zmq_strerror(int error);

#endif
