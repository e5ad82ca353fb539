#!/bin/sh
# Spark's driver calls the image of an executor with `executor` and describes it in variables; everything else is a
# command of tailrace.
set -eu
if [ "${1:-}" != executor ]; then
    exec tailrace "$@"
fi
options=$(env | sed -n 's/^SPARK_JAVA_OPT_[0-9]*=//p')
# Each option is a word of its own.
# shellcheck disable=SC2086
exec java $options "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_EXTRA_CLASSPATH:-}:$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
