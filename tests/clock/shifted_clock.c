/* Shifts the time of day by a constant, for every program that loads this library.
 *
 * Monotonic clocks stay as they are. The kernel keeps the real time: waits until a time of day are shifted back, and the
 * times of files that were written since the run began are shifted forth. The constants are compiled in and not read from
 * the environment, because some of our processes are started with an empty one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#if !defined(SHIFT_SECONDS) || !defined(BEGAN_AT)
#error "By how much, and since when: -DSHIFT_SECONDS=5184000 -DBEGAN_AT=1794970000"
#endif

static int is_time_of_day(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

static struct timespec shift_back(const struct timespec *until) {
    struct timespec real = *until;
    real.tv_sec -= SHIFT_SECONDS;
    return real;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original ? original(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && is_time_of_day(clock)) now->tv_sec += SHIFT_SECONDS;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec precise;
    int result = clock_gettime(CLOCK_REALTIME, &precise);
    if (result == 0) {
        now->tv_sec = precise.tv_sec;
        now->tv_usec = precise.tv_nsec / 1000;
    }
    return result;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*original)(sem_t *, const struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec real = shift_back(until);
    return original(semaphore, &real);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    static int (*original)(sem_t *, clockid_t, const struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "sem_clockwait");
    struct timespec real = shift_back(until);
    return original(semaphore, clock, is_time_of_day(clock) ? &real : until);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*original)(pthread_mutex_t *, const struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec real = shift_back(until);
    return original(mutex, &real);
}

/* A condition does not tell its clock. The monotonic one counts from the start of the machine, so it is far from 2001. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*original)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!original) original = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!original) original = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec real = shift_back(until);
    return original(condition, mutex, until->tv_sec > 1000000000 ? &real : until);
}

int pthread_cond_clockwait(
    pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until
) {
    static int (*original)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    struct timespec real = shift_back(until);
    return original(condition, mutex, clock, is_time_of_day(clock) ? &real : until);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *span, struct timespec *rest) {
    static int (*original)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_nanosleep");
    struct timespec real = shift_back(span);
    return original(clock, flags, (flags & TIMER_ABSTIME) && is_time_of_day(clock) ? &real : span, rest);
}

static int shift_file(int result, struct stat64 *file) {
    if (result == 0) {
        if (file->st_atim.tv_sec >= BEGAN_AT) file->st_atim.tv_sec += SHIFT_SECONDS;
        if (file->st_mtim.tv_sec >= BEGAN_AT) file->st_mtim.tv_sec += SHIFT_SECONDS;
        if (file->st_ctim.tv_sec >= BEGAN_AT) file->st_ctim.tv_sec += SHIFT_SECONDS;
    }
    return result;
}

int stat64(const char *path, struct stat64 *file) {
    static int (*original)(const char *, struct stat64 *);
    if (!original) original = dlsym(RTLD_NEXT, "stat64");
    return shift_file(original(path, file), file);
}

int lstat64(const char *path, struct stat64 *file) {
    static int (*original)(const char *, struct stat64 *);
    if (!original) original = dlsym(RTLD_NEXT, "lstat64");
    return shift_file(original(path, file), file);
}

int fstat64(int descriptor, struct stat64 *file) {
    static int (*original)(int, struct stat64 *);
    if (!original) original = dlsym(RTLD_NEXT, "fstat64");
    return shift_file(original(descriptor, file), file);
}

int fstatat64(int directory, const char *path, struct stat64 *file, int flags) {
    static int (*original)(int, const char *, struct stat64 *, int);
    if (!original) original = dlsym(RTLD_NEXT, "fstatat64");
    return shift_file(original(directory, path, file, flags), file);
}
